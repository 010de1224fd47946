"""Migrations of the application `notify`. A later migration calls `create_tables` again, which adds what is missing."""
