"""The data routes: they pass services' requests to the core, and make answers of its results."""
