"""The relay: from a table to a queue server, for databases without a binlog that could be read."""
