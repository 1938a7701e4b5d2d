"""``fxamp-bench train``: training steps in several kinds of mixed precision, measured side by side."""
