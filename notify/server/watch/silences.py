"""Silences: alarms that an operator has silenced until a time. They survive restarts of this server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.errors import Conflict, NotFound
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread

MOST_SILENCES = 1000

metadata = sa.MetaData()

silence = sa.Table(
    "silence",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("target", sa.String(255), primary_key=True),
    sa.Column("until_us", sa.BigInteger, nullable=False),
    sa.Column("who", sa.String(255), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)

Key = tuple[str, str]
"""An alarm's name and target."""


@dataclass(frozen=True, slots=True)
class Silence:
    """An alarm that is silenced until `until_us` (microseconds since 1970), who silenced it, and why."""

    name: str
    target: str
    until_us: int
    who: str
    reason: str

    def shown(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target,
            "until": instant(self.until_us),
            "who": self.who,
            "reason": self.reason,
        }


class Silences:
    """The silences of one server: in memory, and in its small database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._silences: dict[Key, Silence] = {}

    async def load(self) -> None:
        """Read the silences that an earlier process recorded."""

        def read() -> list[Silence]:
            with self._engine.connect() as connection:
                return [Silence(**row) for row in connection.execute(sa.select(silence)).mappings()]

        self._silences = {(s.name, s.target): s for s in await in_thread(read)}

    def of(self, key: Key, now_us: int) -> Silence | None:
        """The silence of an alarm now; None if the alarm is not silenced."""
        current = self._silences.get(key)
        return current if current is not None and current.until_us > now_us else None

    def listed(self, now_us: int) -> list[Silence]:
        """The silences that hold now, in the order of their ends."""
        return sorted((s for s in self._silences.values() if s.until_us > now_us), key=lambda s: s.until_us)

    async def put(self, new: Silence, now_us: int) -> None:
        """Silence an alarm, or replace its silence. Raises Conflict if there are MOST_SILENCES already."""
        key = (new.name, new.target)
        ended = [other for other, s in self._silences.items() if s.until_us <= now_us and other != key]
        if key not in self._silences and len(self._silences) - len(ended) >= MOST_SILENCES:
            raise Conflict(f"there are {MOST_SILENCES} silences already: end some that are not needed")
        row = {"until_us": new.until_us, "who": new.who[:255], "reason": new.reason}

        def write() -> None:
            with self._engine.begin() as connection:
                for name, target in (*ended, key):
                    connection.execute(_delete(name, target))
                connection.execute(silence.insert().values(name=new.name, target=new.target, **row))

        await in_thread(write)
        for other in ended:
            self._silences.pop(other, None)
        self._silences[key] = new

    async def end(self, key: Key, now_us: int) -> None:
        """End the silence of an alarm. Raises NotFound if the alarm is not silenced."""
        if self.of(key, now_us) is None:
            raise NotFound(f"alarm {key[0][:64]!r} of {key[1][:100]!r} is not silenced")

        def write() -> None:
            with self._engine.begin() as connection:
                connection.execute(_delete(*key))

        await in_thread(write)
        self._silences.pop(key, None)


def _delete(name: str, target: str) -> sa.Delete:
    return silence.delete().where(silence.c.name == name, silence.c.target == target)
