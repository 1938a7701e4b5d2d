"""The differences between two policies: what they say, and what they decide."""
