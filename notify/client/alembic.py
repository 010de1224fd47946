"""Alembic helpers: create the same tables as `create_tables`, in one of the service's own migrations.

    from notify.client.alembic import upgrade, downgrade      # in a revision file, unchanged

When a newer version of Notify needs more tables or columns, write a new revision that calls `upgrade` again: it adds
what is missing, and keeps every row. Let its `downgrade` do nothing (`pass`), because the one above drops the tables.

To keep autogenerate away from Notify's tables, write in env.py:

    context.configure(..., include_object=include_object)
"""

from __future__ import annotations

from typing import Any

from alembic import op

from notify.client.tables.creation import create_tables, drop_tables
from notify.client.tables.definitions import metadata


def upgrade(schema: str | None = None) -> None:
    """Create the tables, and the source id of their schema; see `create_tables`."""
    create_tables(op.get_bind(), schema)


def downgrade(schema: str | None = None) -> None:
    """Drop the tables. Undecided halves of this schema can then only be resolved by an operator."""
    drop_tables(op.get_bind(), schema)


def include_object(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """False for Notify's own tables and indexes."""
    table = name if kind == "table" else getattr(getattr(item, "table", None), "name", None)
    return table not in metadata.tables
