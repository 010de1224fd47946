"""A history of everything at once: who meant what, what the databases hold, what took effect, and what may not be."""
