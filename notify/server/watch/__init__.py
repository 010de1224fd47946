"""Watching the server from within: its last hour in figures, and the alarms that somebody should look at."""
