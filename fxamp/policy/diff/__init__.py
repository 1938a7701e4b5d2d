"""The differences between two policies: in their rules, and in what they decide."""
