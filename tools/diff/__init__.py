"""fxamp-diff: compare two policies, and their effect on a graph and on a model's numbers."""
