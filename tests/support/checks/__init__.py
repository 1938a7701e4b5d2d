"""How results are checked: golden texts, one pass on a tiny graph, counted costs, commands."""
