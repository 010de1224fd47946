"""Transactional messages: a service changes its database and announces it, and either both happen or neither does."""

__version__ = "0.1.0"
