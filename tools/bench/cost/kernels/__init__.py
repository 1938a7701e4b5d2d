"""fxamp-bench kernels: the generated kernels by their machine code, for GPUs that may be absent."""
