"""The bridge: it moves messages from a database's log to a queue, without loading the tables.

The rooms `binlog` (MySQL, MariaDB) and `postgresql` read a log; everything else is the same for both.
"""
