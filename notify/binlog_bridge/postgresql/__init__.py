"""PostgreSQL's write-ahead log, as a replication slot decodes it: its connection, its messages, and its guards."""
