"""Notify's tables. A later version that needs more is a new revision with the same lines."""

from notify.client.alembic import downgrade, upgrade

__all__ = ["downgrade", "upgrade"]

revision = "0001"
down_revision = None
