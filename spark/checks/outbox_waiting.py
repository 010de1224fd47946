"""Outbox rows whose message is in no target: it waits for its relay or bridge, was refused, or a person dropped it.

A relay marks each row that it has sent. A bridge marks no row: with each batch it records its position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from notify.spark.inputs.catalog import Bridged, Catalog
from notify.spark.inputs.columns import source_of

MOVED, WAITS, REFUSED, DROPPED = 0, 1, 2, 3
"""Values of `unmoved`: the target has the message or its producer sent it (MOVED), or why it has not. REFUSED stands
for a row that a producer left behind, too (mode auto): it waits however far a bridge has read."""
UNMOVED_SQL = (
    "CASE WHEN relayed = 4 THEN 2 WHEN relayed IN (2, 3) THEN relayed WHEN relayed = 0 AND mode = 'outbox' THEN 1 "
    "ELSE 0 END"
)
WHY = {
    WAITS: "its relay or bridge has not sent it",
    REFUSED: "its target refuses it, and a person has to decide (notify refused list), or its producer left it behind "
    "while the server was unreachable, and neither a process of the group nor a relay or bridge has sent it",
    DROPPED: "a person dropped it (notify refused list --state DROPPED)",
}


def unmoved_of(row: Mapping[str, Any]) -> int:
    """The value of `unmoved` for a row of half_message."""
    waiting = {0: WAITS} if row["mode"] == "outbox" else {}
    return ({2: REFUSED, 3: DROPPED, 4: REFUSED} | waiting).get(row["relayed"], MOVED)


class _Log(Protocol):
    @property
    def catalog(self) -> Catalog: ...


class _Kafka(Protocol):
    bridges: list[Bridged]


def bridges_of(logs: Iterable[_Log], kafka: Iterable[_Kafka]) -> list[Bridged]:
    """The positions that bridges recorded in these inputs."""
    in_logs = [bridged for log in logs for bridged in log.catalog.bridges]
    return in_logs + [bridged for cluster in kafka for bridged in cluster.bridges]


def bridged_us(sources: Collection[str], bridges: Iterable[Bridged]) -> int:
    """When the bridge of a database last advanced, in microseconds since 1970; 0 if the inputs have no record of it.

    `sources`: the ids that the bridge may use as source. A bridge may have any name: if its name is not the id of a
    database, it may be the bridge of any database.
    """
    times_us = (bridged.time_us for bridged in bridges if source_of(bridged.source) in ("", *sources))
    return max(times_us, default=0)
