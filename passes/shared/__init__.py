"""Helpers for passes: decisions, rules, writers, tables. No file here is a pass."""
