"""The jobs of one server and the results of their items, in the small SQLite database next to its log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.errors import NotFound

metadata = sa.MetaData()

job = sa.Table(
    "job",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("what", sa.String(64), nullable=False),
    sa.Column("target", sa.String(255), nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # running, done, failed
    sa.Column("started_us", sa.BigInteger, nullable=False),
    sa.Column("ended_us", sa.BigInteger, nullable=False, default=0),
    sa.Column("total", sa.Integer, nullable=False, default=0),
    sa.Column("done", sa.Integer, nullable=False, default=0),
    sa.Column("failed", sa.Integer, nullable=False, default=0),
    sa.Column("position", sa.BigInteger, nullable=False, default=0),
    sa.Column("detail", sa.Text, nullable=False, default=""),
)

job_item = sa.Table(
    "job_item",
    metadata,
    sa.Column("job_id", sa.ForeignKey("job.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("result", sa.Text, nullable=False),
)


class JobRecords:
    """Reads and writes, each in a transaction of its own; durable when a write returns. Called from threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add_job(self, what: str, target: str, spec: dict[str, Any], total: int, now_us: int) -> int:
        """Add a running job; its number."""
        row = {"what": what, "target": target, "spec": json.dumps(spec), "state": "running", "total": total}
        with self._engine.begin() as connection:
            inserted = connection.execute(job.insert().values(started_us=now_us, position=spec.get("from", 0), **row))
            key = inserted.inserted_primary_key
        assert key is not None
        return int(key[0])

    def job(self, number: int) -> dict[str, Any]:
        """The job of this number. Raises NotFound."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(job).where(job.c.id == number)).one_or_none()
        if row is None:
            raise NotFound(f"there is no job {number}")
        return dict(row._mapping) | {"spec": json.loads(row.spec)}

    def jobs(self, limit: int, state: str | None = None) -> list[dict[str, Any]]:
        """The newest jobs. Each spec has only `from` and `until`: the rest may list thousands of transactions."""
        span = [sa.func.json_extract(job.c.spec, f"$.{name}").label(name) for name in ("from", "until")]
        columns = [column for column in job.c if column is not job.c.spec]
        query = sa.select(*columns, *span).order_by(job.c.id.desc()).limit(limit)
        if state is not None:
            query = query.where(job.c.state == state)
        with self._engine.connect() as connection:
            rows = [dict(row._mapping) for row in connection.execute(query)]
        return [row | {"spec": {name: row.pop(name) for name in ("from", "until")}} for row in rows]

    def advance(self, number: int, items: Sequence[dict[str, Any]], position: int, first: int) -> None:
        """Store the results of items, numbered from `first`, and the position that the job has reached."""
        failed = sum(1 for item in items if item["status"] >= 400)
        with self._engine.begin() as connection:
            if items:
                rows = [
                    {"job_id": number, "number": first + n, "result": json.dumps(item)} for n, item in enumerate(items)
                ]
                connection.execute(job_item.insert(), rows)
            connection.execute(
                job.update()
                .where(job.c.id == number)
                .values(done=job.c.done + len(items), failed=job.c.failed + failed, position=position)
            )

    def end_job(self, number: int, state: str, detail: str, now_us: int) -> bool:
        """Record a running job's end; False if it has ended already."""
        running = (job.c.id == number) & (job.c.state == "running")
        with self._engine.begin() as connection:
            ended = connection.execute(job.update().where(running).values(state=state, detail=detail, ended_us=now_us))
        return ended.rowcount == 1

    def job_items(self, number: int, first: int, limit: int) -> list[dict[str, Any]]:
        """The results of a job's items from number `first` on, in order."""
        with self._engine.connect() as connection:
            rows = connection.execute(
                sa.select(job_item.c.result)
                .where(job_item.c.job_id == number, job_item.c.number >= first)
                .order_by(job_item.c.number)
                .limit(limit)
            ).scalars()
            return [json.loads(row) for row in rows]
