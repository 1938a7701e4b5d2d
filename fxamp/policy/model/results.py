"""Results that a compiled graph need not make."""

RESULTS = "results"
"""The region of rules on what a graph returns beside a loss."""
