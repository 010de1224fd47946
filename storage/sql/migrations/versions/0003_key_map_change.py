"""The steps of a change of the key map."""

from __future__ import annotations

from alembic import op

from notify.storage.sql.tables import server_key_map_change

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # The first revision makes every table of this version, so on a new database it exists already.
    server_key_map_change.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    server_key_map_change.drop(op.get_bind(), checkfirst=True)
