"""The relay: it moves messages from a table to a queue, for databases without a readable binlog."""
