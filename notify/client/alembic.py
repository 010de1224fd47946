"""For Alembic: the same tables as `create_tables`, in a migration of the service's own.

    from notify.client.alembic import upgrade, downgrade      # in a revision file, as they are

Once a newer version of Notify asks for it, a new revision calls `upgrade` again: it adds what is missing, and keeps
every row. Its own `downgrade` does nothing (`pass`): the one above drops the tables.

So that autogenerate leaves Notify's tables alone, in env.py:

    context.configure(..., include_object=include_object)
"""

from __future__ import annotations

from typing import Any

from alembic import op

from notify.client.making_tables import create_tables, drop_tables
from notify.client.table import metadata


def upgrade() -> None:
    """Make the tables and the database's source id."""
    create_tables(op.get_bind())


def downgrade() -> None:
    """Drop the tables. Undecided halves of this database can then only be resolved by an operator."""
    drop_tables(op.get_bind())


def include_object(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """False for Notify's own tables and indexes."""
    table = name if kind == "table" else getattr(getattr(item, "table", None), "name", None)
    return table not in metadata.tables
