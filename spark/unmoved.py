"""Outbox rows whose message no target has: it waits for its relay or bridge, was refused, or was dropped by a person.

A relay marks each row that it has sent. A bridge marks none: it notes with each batch how far it has come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from notify.spark.catalog import Bridged, Catalog
from notify.spark.columns import source_of

MOVED, WAITS, REFUSED, DROPPED = 0, 1, 2, 3
"""Values of `unmoved`: the target has it or its producer sent it, or why not."""
UNMOVED_SQL = "CASE WHEN mode <> 'outbox' THEN 0 WHEN relayed = 0 THEN 1 WHEN relayed IN (2, 3) THEN relayed ELSE 0 END"
WHY = {
    WAITS: "its relay or bridge has not sent it",
    REFUSED: "its target refuses it, and a person is to decide (notify refused list)",
    DROPPED: "a person dropped it (notify refused list --state DROPPED)",
}


def unmoved_of(row: Mapping[str, Any]) -> int:
    """The same of a row of half_message."""
    if row["mode"] != "outbox":
        return MOVED
    return {0: WAITS, 2: REFUSED, 3: DROPPED}.get(row["relayed"], MOVED)


class _Log(Protocol):
    @property
    def catalog(self) -> Catalog: ...


class _Kafka(Protocol):
    bridges: list[Bridged]


def bridges_of(logs: Iterable[_Log], kafka: Iterable[_Kafka]) -> list[Bridged]:
    """The positions that bridges have noted in these inputs."""
    return [b for log in logs for b in log.catalog.bridges] + [b for queues in kafka for b in queues.bridges]


def bridged_us(sources: Collection[str], bridges: Iterable[Bridged]) -> int:
    """When the bridge of a database last moved on, in microseconds since 1970; 0 if the inputs know of none.
    `sources`: the ids by which it may name itself.

    A bridge may have any name: one whose name is no database's id may be that of each.
    """
    return max((b.time_us for b in bridges if source_of(b.source) in ("", *sources)), default=0)
