"""Actions, settings by revision and credentials, shared by all servers of a registry."""

from __future__ import annotations

from alembic import op

from notify.storage.sql import administration

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    administration.metadata.create_all(op.get_bind())


def downgrade() -> None:
    administration.metadata.drop_all(op.get_bind())
