"""Connections: how many there may be, what each may send and leave unread, and the certificate that they are made with."""
