"""One database as a storage of transactions. Any number of servers share it; none keeps state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.errors import InvalidRequest, NotifyError, StorageFailed
from notify.protocol import ids
from notify.protocol.limits import check_name
from notify.runtime.databases import shown_url
from notify.storage.groups import Subscription
from notify.storage.members import Member
from notify.storage.records import (
    Decided,
    InDoubt,
    NewTransaction,
    PartlyStored,
    PutResult,
    State,
    Transaction,
)
from notify.storage.sql import lookups, registry, schema, undecided
from notify.storage.sql.checks import SqlChecks
from notify.storage.sql.database import Database
from notify.storage.sql.dialect import NUL, has_nul
from notify.storage.sql.lookups import first_rows, rows_by_id, transaction_of
from notify.storage.sql.retention import SqlRetention
from notify.storage.sql.rows import moment_of
from notify.storage.sql.tables import server_half_message
from notify.storage.sql.writer import WRITERS, Writer
from notify.storage.topics import Topic
from notify.storage.transactions import NO_SHARDS, NO_TOKENS, without_bodies_beyond

TOPICS_KEPT = 100_000
READ_AT_ONCE = 16
"""How many transactions are read at a time: one may have 8 MiB."""

_t = server_half_message.c


class DatabaseAway(StorageFailed):
    """A database cannot be opened: it does not answer, or the URL is wrong."""


class SqlStore:
    """Halves, outcomes and checks in one database (PostgreSQL, MySQL, MariaDB, SQLite).

    `shard` is the database's name among several. Times come from the caller, as in every storage.
    """

    def __init__(self, url: str, shard: str = "main", *, retention_us: int = 0, writers: int = WRITERS) -> None:
        """`retention_us`: how long decided transactions are kept; 0: no bound. Raises InvalidRequest for a bad URL."""
        self.shard = shard
        self._database = database = Database(url, shard)
        self.engine = database.engine
        self.dialect = database.dialect
        self._writers = 1 if self.engine.dialect.name == "sqlite" else writers
        self._topics: dict[str, Topic] = {}
        self.writer: Writer
        checks = SqlChecks(database)
        retention = SqlRetention(database, retention_us)

        # Exposed: CheckStore, and Retaining.
        self.claim_checks = checks.claim
        self.release_checks = checks.release
        self.answer_check = checks.answer
        self.checking = checks.checking
        self.resume_checks = checks.resume
        self.half_contents = checks.half_contents
        self.next_check_us = checks.next_us
        self.keep = retention.keep
        self.retain = retention.retain

    # --- opening ----------------------------------------------------------------------------------------------

    async def open(self, now_us: int) -> None:
        """Check the tables and begin to write. Raises StorageFailed with what to do."""
        await self._database.in_thread(self._check)
        self.writer = Writer(self.dialect, self._rows_of, self.shard)
        self.writer.start(self._writers)

    def _check(self) -> None:
        try:
            if self.engine.dialect.name == "sqlite":
                schema.upgrade(self.engine, self.shard)  # the file belongs to this server alone
            schema.check(self.engine, self.shard)
        except sa.exc.DBAPIError as error:
            raise DatabaseAway(
                f"shard {self.shard!r}: the database {shown_url(self.engine)} refuses: {error.orig}"
            ) from None

    async def close(self) -> None:
        await self.writer.close()
        self._database.close()

    async def probe(self) -> None:
        """Check whether the database accepts writes again. Raises Unavailable if not."""
        await self._database.run(_write_and_remove)
        self.writer.failing_since = 0.0

    # --- what it is -------------------------------------------------------------------------------------------

    def shards(self) -> Sequence[str]:
        return (self.shard,)

    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    def topic(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def has_topic(self, name: str) -> bool:
        """Whether the name was used here; queue servers have the topics and their policies."""
        return name in self._topics

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        check_name("topic", topic.name)
        if len(self._topics) >= TOPICS_KEPT:
            self._topics.clear()
        self._topics[topic.name] = topic

    # --- halves and outcomes ----------------------------------------------------------------------------------

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        if not self.dialect.holds_nul and any(map(has_nul, transactions)):
            results = await self._put_without_nul(transactions, now_us)
        else:
            results = await self.writer.put(transactions, now_us)
        stored = [result for result in results if result.__class__ is PutResult]
        for result in stored:
            result.shard = self.shard
        if len(stored) < len(results):
            raise PartlyStored(results)
        return stored

    async def _put_without_nul(
        self, transactions: Sequence[NewTransaction], now_us: int
    ) -> list[PutResult | NotifyError]:
        """Refuse transactions with a NUL, which would have a whole batch written again in parts."""
        held = [t for t in transactions if not has_nul(t)]
        stored = iter(await self.writer.put(held, now_us) if held else ())
        return [InvalidRequest(NUL, "invalid_value") if has_nul(t) else next(stored) for t in transactions]

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        return await self.writer.decide(outcomes, now_us, tokens)

    async def states(self, ids_: Sequence[bytes]) -> list[State | None]:
        names = [ids.to_text(i) for i in ids_]
        known = await self._database.run(lambda connection: first_rows(connection, names, _t.state))
        return [State[known[name]] if name in known else None for name in names]

    async def producer_groups(self, ids_: Sequence[bytes]) -> list[str | None]:
        names = [ids.to_text(i) for i in ids_]
        known = await self._database.run(lambda connection: first_rows(connection, names, _t.producer_group))
        return [known.get(name) or None for name in names]

    def _rows_of(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """All rows of transactions, in message order, read on a connection of its own."""
        with self.engine.begin() as connection:
            return rows_by_id(connection, names)

    # --- for the administrator --------------------------------------------------------------------------------

    async def stored_bodies(self, after: str) -> tuple[set[str], str]:
        """See NamesBodies. A place is a transaction's id: ids grow with time, and a row keeps its id."""
        return await self._database.run(lambda connection: lookups.stored_bodies(connection, after))

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        name = ids.to_text(transaction_id)
        rows = (await self._database.run(lambda connection: rows_by_id(connection, [name]))).get(name)
        return transaction_of(rows, self.shard) if rows else None

    async def in_doubt(self) -> InDoubt:
        return await self._database.run(undecided.in_doubt)

    async def undecided(
        self,
        state: State | None,
        producer_group: str | None,
        older_than_us: int | None,
        limit: int,
        most_bytes: int | None = None,
    ) -> list[Transaction]:
        def read(connection: Connection) -> list[Transaction]:
            wanted = sa.select(_t.transaction_id).where(undecided.condition(connection, state, producer_group))
            if older_than_us is not None:
                wanted = wanted.where(_t.created_at <= moment_of(older_than_us))
            names = [str(name) for name in connection.scalars(wanted.order_by(*undecided.OLDEST_FIRST).limit(limit))]
            return without_bodies_beyond(self._read(connection, names, most_bytes), most_bytes)

        return await self._database.run(read)

    def _read(self, connection: Connection, names: Sequence[str], most_bytes: int | None) -> Iterator[Transaction]:
        """Transactions by their ids, some at a time; without bodies after `most_bytes` of messages."""
        size = 0
        for first in range(0, len(names), READ_AT_ONCE):
            some = names[first : first + READ_AT_ONCE]
            by_id = rows_by_id(connection, some, bodies=most_bytes is None or size <= most_bytes)
            for name in some:
                if name in by_id:
                    t = transaction_of(by_id[name], self.shard)
                    size += t.payload_bytes
                    yield t


def _write_and_remove(connection: Connection) -> None:
    """Write and remove a row: a standby, or a database without space, answers reads too."""
    name = f"probe-{ids.to_text(ids.new_id())}"
    registry.heartbeat(connection, Member(name, "probe"))
    registry.leave(connection, name)
