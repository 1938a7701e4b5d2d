"""fxamp-policy: check, show and explain policies, without torch."""
