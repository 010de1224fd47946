"""How the SDK reaches the queue servers: HTTP, logins, the choice of a server, and batches."""
