"""The binlog of MySQL and MariaDB: its connection, its events, its positions, and the checks of a source."""
