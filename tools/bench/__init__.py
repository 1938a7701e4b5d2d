"""fxamp-bench: measures fxamp itself. Each subcommand is a module or a folder here."""
