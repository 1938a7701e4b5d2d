"""Passes for the graph of an optimizer's step. Each file is one pass."""
