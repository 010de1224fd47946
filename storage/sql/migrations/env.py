"""Alembic runs this with the connection of storage/sql/schema.py."""

from alembic import context

from notify.storage.sql.schema import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
