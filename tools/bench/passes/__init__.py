"""fxamp-bench passes: how the time of capture and passes grows, and their share of a torch.compile."""
