"""How dQ is made on Hopper: sums in memory, or dS in slots and a loop over them."""
