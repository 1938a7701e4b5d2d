"""Group the parameters that one program can step."""
