"""Transactions in a database: any number of stateless servers share it."""

from storage.sql.store import SqlStore

__all__ = ["SqlStore"]
