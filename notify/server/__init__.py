"""The server: transactions, checks and delivery over a storage, served over HTTP."""
