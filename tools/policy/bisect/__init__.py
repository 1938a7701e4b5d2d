"""fxamp-policy bisect: the smallest set of modules, or rules, to widen."""
