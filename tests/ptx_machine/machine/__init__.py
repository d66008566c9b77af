"""Warps, memory and their order: what executes PTX."""
