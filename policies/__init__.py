"""The shipped policy files, read as package data of ``fxamp.policies``."""
