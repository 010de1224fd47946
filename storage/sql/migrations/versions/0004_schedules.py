"""Schedules of recurring messages."""

from __future__ import annotations

from alembic import op

from notify.storage.sql.administration import server_schedule

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # An earlier revision makes every administrative table of this version, so on a new database it exists already.
    server_schedule.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    server_schedule.drop(op.get_bind(), checkfirst=True)
