"""State in fewer bits, as a policy's ``[optimizer]`` asks for it."""
