"""The server: transactions, checks and delivery over a storage, spoken to over HTTP."""
