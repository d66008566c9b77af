"""Launches of the package on the machine, and the smallest problems that show a mistake."""
