"""Passes over the two graphs that AOTAutograd's partition makes of one: what crosses from forward to backward."""
