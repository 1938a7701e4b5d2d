"""The graph-rewriting passes, one per file. Import as ``fxamp.passes``."""
