"""The forward pass on Hopper in 16 bits."""
