"""The first tables; later changes of storage/sql/tables.py get revisions of their own."""

from __future__ import annotations

from alembic import op

from notify.storage.sql import tables

revision = "0001"
down_revision = None


def upgrade() -> None:
    tables.metadata.create_all(op.get_bind())


def downgrade() -> None:
    tables.metadata.drop_all(op.get_bind())
