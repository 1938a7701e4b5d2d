"""float16 outside compiled graphs: float16 gradients are scaled there, and all others are unscaled."""
