"""The data routes: from a request of a service to the core, and from the core's result to the answer."""
