"""fxamp-diff: what two policies decide differently, and what becomes of a graph and of a model's numbers by it."""
