"""fxamp-policy fit: the policy for a GPU and its memory."""
