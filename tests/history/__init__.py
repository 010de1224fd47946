"""A history of everything at once: intents, databases and effects are recorded, and compared at the end."""
