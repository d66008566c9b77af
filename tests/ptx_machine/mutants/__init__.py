"""Mistakes in kernels, each of which a problem has to show."""
