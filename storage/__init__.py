"""Where messages, transactions and progress are kept: the embedded log, and memory for tests."""
