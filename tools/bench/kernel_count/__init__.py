"""fxamp-bench kernels --count: the generated kernels by their machine code, for GPUs that need not be here."""
