"""From the database to the queue without loading the server: the relay for outboxes (the binlog bridge follows)."""
