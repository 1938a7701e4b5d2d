"""The same work by somebody else's code: eager autocast, torch's scaler, torchao, saved_tensors_hooks."""
