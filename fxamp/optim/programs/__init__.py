"""Compile the step: one program for all parameters that can share it, and one for the others."""
