"""The inputs of the tools: listings, dumps, exported programs, model files."""
