"""The server among others: its place in the registry, and the work that it tells them of."""
