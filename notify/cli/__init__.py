"""The `notify` command: one file for each command group."""
