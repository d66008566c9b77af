"""Loops on Hopper that keep a bias of all batch elements in shared memory."""
