"""From a Python function to a kernel that runs: compiler, kernels on disk, driver, launches."""
