"""Notify's tables in a service's database: their definition, creation, rows and purge."""
