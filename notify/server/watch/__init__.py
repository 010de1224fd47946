"""The server watches itself: figures of its last hour and day, and alarms."""
