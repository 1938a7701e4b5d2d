"""float16 outside of compiled graphs: gradients in float16 are scaled there, all others are true."""
