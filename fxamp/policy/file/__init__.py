"""Find, check, merge and write policy files, and describe their schema."""
