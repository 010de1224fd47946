"""Connections: the bounds on their number, on what each may send and leave unread, and their TLS certificate."""
