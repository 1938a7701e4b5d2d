"""Passes for the captured forward graph: they decide on dtypes and insert casts. Each file is one pass."""
