"""The backward pass on tensor cores since Turing."""
