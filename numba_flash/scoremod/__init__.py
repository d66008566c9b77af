"""Functions of a score that users write: what is asked of them, and what they capture."""
