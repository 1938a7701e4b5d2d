"""Passes for the forward and backward that AOTAutograd partitions: they change what is saved between the two."""
