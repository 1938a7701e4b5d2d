"""Machines: what one lacks, GPUs that are simulated, machine code, forked processes and ranks."""
