"""What passes are written with: decisions, rules, writers, tables. No file here is a pass."""
