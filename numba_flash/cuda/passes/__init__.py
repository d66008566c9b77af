"""Kernels that run before and after main loops: delta, planes of float16, sums of parts and of
shares.
"""
