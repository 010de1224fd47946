"""Findings about one message, their evidence, and the bounds of what can be judged."""
