"""Migrations of the application `notify`. A later one calls `create_tables` again, which adds what is missing."""
