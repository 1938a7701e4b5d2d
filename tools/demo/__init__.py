"""fxamp-demo: trains a small GPT in float32 and through fxamp, and compares the two."""
