"""A machine that executes PTX, without a GPU."""
