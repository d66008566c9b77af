"""``python -m numba_flash bench``: this library beside its peers, in one process, in turn, checked before it is timed."""
