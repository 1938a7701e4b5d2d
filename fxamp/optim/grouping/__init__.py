"""Which parameters one program can step."""
