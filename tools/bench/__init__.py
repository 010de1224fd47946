"""Measurements through the public SDK against a real server process, verified at the end."""
