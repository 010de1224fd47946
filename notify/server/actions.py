"""Who did what: every write of an administrator, with its reason, in a small SQLite database beside the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()

action = sa.Table(
    "action",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("who", sa.String(255), nullable=False),
    sa.Column("what", sa.String(64), nullable=False),
    sa.Column("target", sa.String(255), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("result", sa.Text, nullable=False),
)


class Actions:
    """The record of administrative writes."""

    def __init__(self, data_dir: str) -> None:
        path = Path(data_dir) / "admin.db"
        path.touch(mode=0o600, exist_ok=True)
        self._engine = sa.create_engine(f"sqlite:///{path}")
        metadata.create_all(self._engine)

    def record(self, at_us: int, who: str, what: str, target: str, reason: str, result: Any) -> None:
        """Add one action; durable when it returns."""
        row = {
            "at_us": at_us,
            "who": who,
            "what": what,
            "target": target,
            "reason": reason,
            "result": json.dumps(result),
        }
        with self._engine.begin() as connection:
            connection.execute(action.insert().values(**row))

    def newest(self, limit: int) -> list[dict[str, Any]]:
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(action).order_by(action.c.id.desc()).limit(limit))
            return [dict(row._mapping) for row in rows]

    def close(self) -> None:
        self._engine.dispose()
