"""Compiled graphs: their backwards scale, unscale and check inside, and report flags for each gradient."""
