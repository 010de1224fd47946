"""Consumers and readers of queue servers."""
