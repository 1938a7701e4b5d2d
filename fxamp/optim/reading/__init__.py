"""The inputs of the optimizer's next step."""
