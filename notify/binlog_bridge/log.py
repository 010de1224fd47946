"""The protocols of a database's log: what a bridge asks of a binlog of MySQL or MariaDB, and of PostgreSQL's WAL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sqlalchemy.engine import Connection, Engine

from notify.binlog_bridge.scope import Scope
from notify.protocol.wire import PackedBridgeBatch
from notify.storage.sql.checkup import Finding

Read = tuple[PackedBridgeBatch, int]
"""A batch, and when its newest row was written, in microseconds by the source's clock (0: it has no rows). The caller
adds the epoch and the position before the batch. A batch to `prepare` has no position: the position does not move."""


class Retained(NamedTuple):
    """The part of the log that a source keeps for one reader. Sizes of its log are in bytes."""

    kept: int
    left: int | None
    """How much more may be written before the source gives the reader up; None: there is no bound."""
    age: int
    """How many transactions old the oldest is whose catalogue rows are kept for the reader."""


class Position(Protocol):
    """A place in a log, between two transactions. The queue stores and compares `text`."""

    @property
    def text(self) -> str: ...

    @property
    def newest_us(self) -> int:
        """When the newest transaction before it was written, in microseconds by the source's clock; 0: unknown."""
        ...

    @property
    def scope(self) -> str:
        """The schemas whose tables were read up to it: see Scope; "": unknown."""
        ...

    @property
    def shown(self) -> str:
        """The place for people to read."""
        ...

    def reaches(self, other: Any) -> bool:
        """Whether it is at another position of the same log, or beyond it."""
        ...


class Reader(Protocol):
    """One connection to a log, from a position on."""

    @property
    def caught_up_us(self) -> int:
        """When the source last had no more events; 0 after the next transaction began.

        The time is by this machine's clock, in microseconds since 1970.
        """
        ...

    def connect(self) -> None:
        """Raises Purged if the position is gone or foreign, Unavailable if the source does not answer, Unfit if it
        refuses this user."""
        ...

    def batches(self) -> Iterator[Read]:
        """Batches of committed transactions in the order of their commits; a batch without messages has the position
        only. Raises Purged, Unreadable, and Unavailable when the connection ends."""
        ...

    def confirm(self, position: str) -> None:
        """Tell the source that a position is stored: it need not keep what is before. From any thread."""
        ...

    def keep_up(self) -> None:
        """Called by the reading thread at least once a second while it cannot read on, so that the source does not
        take the connection for dead."""
        ...

    def close(self) -> None:
        """End the connection, from any thread; a thread that waits for events is woken."""
        ...


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """The tables at one moment, and where in the log that is."""

    connection: Connection
    """A transaction that sees the tables as they were."""
    position: Position
    """A position that has no transactions before it that the snapshot lacks."""
    until: Position
    """A position after all transactions in the snapshot."""


class DatabaseLog(Protocol):
    """The log of one source, on whichever of its candidates the caller has a connection to."""

    @property
    def takes_tables_first(self) -> bool:
        """Whether a bridge without a position begins with a backfill: the log has nothing from before the bridge."""
        ...

    def check(
        self, connection: Connection, name: str, scope: Scope, schemas: Sequence[str] | None, *, fill: bool
    ) -> None:
        """Check a candidate before it is read. `name`: the source's; `schemas`: those with its tables, None: the
        connection's own; `fill`: whether a backfill comes first, which makes what is missing.

        Raises Unfit with all remedies if it cannot be bridged without gaps.
        """
        ...

    def findings(self, connection: Connection, name: str, scope: Scope) -> list[Finding]:
        """All findings about a candidate, those that stop a bridge first. Changes nothing."""
        ...

    def watch(self, engine: Engine) -> Retained | None:
        """Look at a source that is being read, about every two seconds; what it keeps for this reader, None if it keeps
        nothing for readers. Raises Unfit if rows would be missed from now on, Unavailable if the connection by which it
        is read has fallen silent."""
        ...

    def stopped_at(self, text: str) -> str:
        """The position to store after `watch` raised Unfit. The log may lack rows before it, so that the next bridge
        has to stop, too, even if all looks right again by then."""
        ...

    def denied(self, error: BaseException | None) -> str | None:
        """The remedy for a driver's error that lasts until an operator acts; None for any other error."""
        ...

    def check_kind(self, position: Position | None) -> None:
        """Raises Unfit if a position of another kind of server would be continued at this one."""
        ...

    def reader(
        self,
        engine: Engine,
        position: Position | None,
        *,
        scope: Scope,
        source_us: Callable[[], int],
        known_seconds: float,
        most_bytes: Callable[[], int],
    ) -> Reader:
        """A reader from a position on. `source_us`: the time by the source's clock, in microseconds. `known_seconds`:
        a row that was written so long before its event has come back with a dump: its transaction is `Returned`.
        `most_bytes` tells how large batches become, in bytes of rows."""
        ...

    def prepare_backfill(self, engine: Engine) -> None:
        """Make what the log needs to be read from now on; what it lacks is taken from the tables. Raises Unfit."""
        ...

    def snapshot(self, engine: Engine) -> LogSnapshot:
        """Begin a transaction that sees the tables as they are now. Raises Unfit if the source does not tell the
        position."""
        ...
