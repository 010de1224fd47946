"""Findings beyond one message's row: order, dead letters, damage, rows out of place."""
