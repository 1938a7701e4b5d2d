"""fxamp-bench kernels: the gradient kernels against the ops of torch that do the same."""
