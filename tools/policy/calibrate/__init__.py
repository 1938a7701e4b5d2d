"""fxamp-policy calibrate: a policy patch from the ranges of a model's own values and gradients."""
