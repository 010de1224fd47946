"""A continuous audit: its windows, its state, and the alarms that it raises."""
