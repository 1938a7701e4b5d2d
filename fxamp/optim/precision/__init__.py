"""Optimizer state in fewer bits, for policies with an ``[optimizer]`` table."""
