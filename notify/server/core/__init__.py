"""The server without HTTP: transactions, checks, bridges, and the admission of messages, over one storage."""
