"""Files that the package keeps: checksums, hashes of sources, and what is said while kernels are compiled."""
