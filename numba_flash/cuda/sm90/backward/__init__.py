"""The backward pass on Hopper in 16 bits: dK and dV, and dS for dQ."""
