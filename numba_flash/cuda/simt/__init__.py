"""The tier for any CUDA GPU and for Numba's simulator: readable kernels without tensor cores."""
