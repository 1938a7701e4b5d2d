"""The graph-rewriting passes, one a file. Import as ``fxamp.passes``."""
