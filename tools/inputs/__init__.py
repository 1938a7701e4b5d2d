"""What a tool is given: listings, dumps, exported programs, model files."""
