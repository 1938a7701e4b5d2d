"""fxamp-bench cost: what a training step costs on a GPU, counted from what Inductor generates for it."""
