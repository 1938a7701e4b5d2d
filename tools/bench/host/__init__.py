"""What fxamp costs the host in a step: tiny layers, so that nothing else counts."""
