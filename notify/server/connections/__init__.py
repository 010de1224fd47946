"""Connections: how many there may be, what each may send and leave unread, and their certificate."""
