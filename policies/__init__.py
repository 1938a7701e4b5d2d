"""The built-in policy files, read as package data of ``fxamp.policies``."""
