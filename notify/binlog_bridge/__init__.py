"""The bridge: it moves messages from the binlog of MySQL or MariaDB to a queue, without loading the server."""
