"""The forward pass on tensor cores since Turing."""
