"""What the optimizer's next step will read."""
