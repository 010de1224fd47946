"""Schedules of recurring messages: when they are due, what is stored of them, and who sends their messages."""
