"""torch.amp.GradScaler as a training loop sees it: it checks gradients, skips steps and adapts the scale."""
