"""The oracle: what the real torch.autocast does to an op, on any device, without that device."""
