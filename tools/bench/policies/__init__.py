"""``fxamp-bench policies``: what each shipped policy costs, and how exact it is; ``fxamp-policy list`` prints it."""
