"""Outbox rows whose message is in no target: it waits for its relay or bridge, was refused, or a person dropped it.

A relay marks each row that it has sent. A bridge marks no row: with each batch it records its position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from notify.spark.inputs.catalog import Bridged, Catalog
from notify.spark.inputs.columns import source_of

MOVED, WAITS, REFUSED, DROPPED = 0, 1, 2, 3
"""Values of `unmoved`: the target has the message or its producer sent it (MOVED), or why it has not."""
UNMOVED_SQL = "CASE WHEN mode <> 'outbox' THEN 0 WHEN relayed = 0 THEN 1 WHEN relayed IN (2, 3) THEN relayed ELSE 0 END"
WHY = {
    WAITS: "its relay or bridge has not sent it",
    REFUSED: "its target refuses it, and a person has to decide (notify refused list)",
    DROPPED: "a person dropped it (notify refused list --state DROPPED)",
}


def unmoved_of(row: Mapping[str, Any]) -> int:
    """The value of `unmoved` for a row of half_message."""
    if row["mode"] != "outbox":
        return MOVED
    return {0: WAITS, 2: REFUSED, 3: DROPPED}.get(row["relayed"], MOVED)


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
