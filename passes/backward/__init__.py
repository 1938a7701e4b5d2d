"""Passes for the backward graph that AOTAutograd derives and partitions. Each file is one pass."""
