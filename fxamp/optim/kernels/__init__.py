"""A step as a generated Triton kernel."""
