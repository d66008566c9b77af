"""The tier for tensor cores since Turing: mma.sync, ldmatrix, cp.async; every option."""
