"""Policy files: finding, checking, merging and writing them, and their schema."""
