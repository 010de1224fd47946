"""The `notify` command: one file a command group."""
