"""Heads in float32 whose keys all fit into shared memory."""
