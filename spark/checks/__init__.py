"""Findings that are not about the row of one message: order, dead letters, damage, rows out of place."""
