"""The inbox: a handler's effect and the row that records it, in one transaction."""
