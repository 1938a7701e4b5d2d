"""fxamp-bench kernels: the generated kernels by their machine code, for GPUs that need not be here."""
