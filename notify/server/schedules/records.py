"""The stored schedules: a table that all servers of a registry share. Called from threads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.errors import Conflict
from notify.server.schedules.schedule import Mark
from notify.storage.sql.administration import changing, server_schedule

SCHEDULES = "schedules"
"""Their name in `server_change`."""
_s = server_schedule.c


class ScheduleRecords:
    """Reads and writes schedules, each in its own transaction; a write is durable when it returns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all(self) -> list[dict[str, Any]]:
        """The rows of all schedules, by name."""
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(sa.select(server_schedule).order_by(_s.name)).mappings()]

    def one(self, name: str) -> dict[str, Any] | None:
        """The row of a schedule; None if there is none."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(server_schedule).where(_s.name == name)).mappings().one_or_none()
            return None if row is None else dict(row)

    def add(self, name: str, place: str, declaration: str, now_us: int, who: str) -> None:
        """Add a schedule whose first instant is after `now_us`. Raises Conflict if there is one of this name."""
        values: dict[str, Any] = dict.fromkeys(("paused", "sent", "missed", "last_instant_us", "last_sent_us"), 0)
        values |= {"name": name, "secret": secrets.token_hex(16), "place": place, "declaration": declaration}
        values |= {"done_us": now_us, "changed_us": now_us, "who": who[:255]}
        try:
            with changing(self._engine, SCHEDULES) as connection:
                connection.execute(server_schedule.insert().values(values))
        except sa.exc.IntegrityError:
            raise Conflict(f"schedule {name!r} was made by someone else just now: look, and try again") from None

    def change(self, name: str, known_us: int, declaration: str, now_us: int, who: str, done_us: int | None) -> None:
        """Replace a declaration. `done_us`: leave out every instant up to this one; None: as it is.

        Raises Conflict if the schedule was changed since `known_us`.
        """
        values: dict[str, Any] = {"declaration": declaration, "changed_us": now_us, "who": who[:255]}
        values |= {} if done_us is None else {"done_us": done_us}
        with changing(self._engine, SCHEDULES) as connection:
            is_same = (_s.name == name) & (_s.changed_us == known_us)
            if not connection.execute(server_schedule.update().where(is_same).values(values)).rowcount:
                raise Conflict(f"schedule {name!r} was changed by someone else just now: look, and try again")

    def pause(self, name: str, paused: bool, now_us: int, who: str) -> bool:
        """Pause or resume a schedule; what is due up to a resume is left out. Returns whether there is one."""
        values: dict[str, Any] = {"paused": int(paused), "changed_us": now_us, "who": who[:255]}
        values |= {} if paused else {"done_us": now_us}
        with changing(self._engine, SCHEDULES) as connection:
            found = connection.execute(server_schedule.update().where(_s.name == name).values(values))
            return bool(found.rowcount)

    def delete(self, name: str) -> bool:
        """Delete a schedule. Returns whether there was one."""
        with changing(self._engine, SCHEDULES) as connection:
            return bool(connection.execute(server_schedule.delete().where(_s.name == name)).rowcount)

    def positions(self, names: Sequence[str]) -> dict[str, tuple[str, int, int, int, int, int, bool]]:
        """By the names of known schedules: secret, done_us, sent, missed, the last instant and when it was sent,
        and whether it is paused."""
        columns = (_s.name, _s.secret, _s.done_us, _s.sent, _s.missed, _s.last_instant_us, _s.last_sent_us, _s.paused)
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(*columns).where(_s.name.in_(names))).all()
        return {name: (secret, *numbers, bool(paused)) for name, secret, *numbers, paused in rows}

    def mark(self, marks: Sequence[Mark]) -> set[str]:
        """Record one step of each schedule; the names of those whose step is recorded. It is not if the schedule was
        moved on, changed or deleted meanwhile."""
        in_order = sorted(marks, key=lambda mark: mark.name)  # two servers lock the rows in the same order
        with self._engine.begin() as connection:
            return {mark.name for mark in in_order if connection.execute(_step(mark)).rowcount}


def _step(mark: Mark) -> sa.Update:
    is_there = (_s.name == mark.name) & (_s.secret == mark.secret) & (_s.done_us == mark.from_us)
    values: dict[str, Any] = {"done_us": mark.to_us, "sent": _s.sent + mark.sent, "missed": _s.missed + mark.missed}
    if mark.sent:
        values |= {"last_instant_us": mark.last_instant_us, "last_sent_us": mark.sent_us}
    return server_schedule.update().where(is_there).values(values)
