"""Run the optimizer's own code on tensors without values, and record the ops."""
