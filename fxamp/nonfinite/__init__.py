"""Say which op made the first value that is not finite: what flows where in a graph, and what its runs measured."""
