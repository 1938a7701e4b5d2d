"""Find the op that produced the first non-finite value, from a graph's data flow and the magnitudes of its runs."""
