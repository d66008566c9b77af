"""The gradient of a bias on tensor cores since Turing."""
