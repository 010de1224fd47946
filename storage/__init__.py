"""Stores messages, transactions and progress: in the embedded log, in SQL databases, and in memory for tests."""
