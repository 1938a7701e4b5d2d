"""``fxamp-bench train``: training steps by several ways of mixed precision, measured side by side."""
