"""The gradient of a bias on Hopper."""
