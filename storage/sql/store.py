"""One database as a storage of transactions. Any number of servers share it; none of them keeps state of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from notify import ids
from notify.errors import StorageFailed, Unavailable
from notify.limits import check_name
from notify.storage.checks import CheckAnswer, Checking, Due, new_token
from notify.storage.groups import Subscription
from notify.storage.hashing import tag_hash
from notify.storage.records import (
    Decided,
    InDoubt,
    NewTransaction,
    PartlyStored,
    PutResult,
    State,
    StoredMessage,
    Transaction,
)
from notify.storage.sql import schema
from notify.storage.sql.dialects import Again, Duplicate, Gone, dialect_of, open_engine
from notify.storage.sql.registry import read_through_us
from notify.storage.sql.rows import UNDECIDED, microseconds_of, moment_of, payload_of
from notify.storage.sql.tables import server_half_message
from notify.storage.sql.writer import WRITERS, Writer
from notify.storage.topics import Topic
from notify.storage.transactions import NO_SHARDS, NO_TOKENS, counted

log = structlog.get_logger("notify.sql")

LOOK_EVERY_US = 500_000
"""How often a server looks for due checks of a group that polls it."""
READERS = 4
ATTEMPTS = 5
PURGE_TRANSACTIONS = 500
PURGE_ROUNDS = 40
"""Rows are deleted a few hundred at a time, each in a transaction of its own, and so many rounds a call."""
TOPICS_KEPT = 100_000
IDS_A_STATEMENT = 500

T = TypeVar("T")
_t = server_half_message.c


class DatabaseAway(StorageFailed):
    """A database cannot be opened: it does not answer, or not to this address."""


class SqlStore:
    """Halves, outcomes and checks in one database (PostgreSQL, MySQL, MariaDB, SQLite).

    `shard` is the database's name among several. Times come from the caller, as in every storage.
    """

    def __init__(self, url: str, shard: str = "main", *, retention_us: int = 0, writers: int = WRITERS) -> None:
        """`retention_us`: how long decided transactions are kept; 0: for ever. Raises InvalidRequest for a bad URL."""
        self.shard = shard
        self.engine = open_engine(url)
        self._retention_us = retention_us
        self._dialect = dialect_of(self.engine)
        self._writers = 1 if self.engine.dialect.name == "sqlite" else writers
        self._topics: dict[str, Topic] = {}
        self._look_us: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(READERS, f"notify-sql-read-{shard}")
        self.writer: Writer

    # --- opening ----------------------------------------------------------------------------------------------

    async def open(self, now_us: int) -> None:
        """Check the tables and begin to write. Raises StorageFailed with what to do."""
        await self._in_thread(self._check)
        self.writer = Writer(self._dialect, self._rows_of, self.shard)
        self.writer.start(self._writers)

    def _check(self) -> None:
        try:
            if self.engine.dialect.name == "sqlite":
                schema.upgrade(self.engine, self.shard)  # a file of this server's own
            schema.check(self.engine, self.shard)
        except sa.exc.DBAPIError as error:
            raise DatabaseAway(
                f"shard {self.shard!r}: the database {self.engine.url.render_as_string()} refuses: {error.orig}"
            ) from None

    async def close(self) -> None:
        await self.writer.close()
        self._pool.shutdown(wait=True)
        self.engine.dispose()

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _read(self, function: Callable[[Connection], T]) -> T:
        """The function's result in a transaction of its own, tried again after deadlocks. Raises Unavailable."""
        return await self._in_thread(self._with_connection, function)

    def _with_connection(self, function: Callable[[Connection], T]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                with self.engine.begin() as connection:
                    return function(connection)
            except sa.exc.DBAPIError as error:
                cause = self._dialect.error(error.orig)
                again = isinstance(cause, Again | Duplicate) or (isinstance(cause, Gone) and not attempt)
                if attempt + 1 == ATTEMPTS or not again:
                    raise Unavailable(f"shard {self.shard!r}: the database does not answer ({error.orig})") from None
        raise AssertionError("the loop returns or raises")

    async def probe(self) -> None:
        """See whether the database answers again. Raises Unavailable where it does not."""
        await self._read(lambda connection: connection.execute(sa.select(1)).scalar_one())
        self.writer.failing_since = 0.0

    # --- what it is -------------------------------------------------------------------------------------------

    def shards(self) -> Sequence[str]:
        return (self.shard,)

    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    def topic(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def has_topic(self, name: str) -> bool:
        """Whether the name has been used here: topics and their policies are the queue servers'."""
        return name in self._topics

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        check_name("topic", topic.name)
        if len(self._topics) >= TOPICS_KEPT:
            self._topics.clear()
        self._topics[topic.name] = topic

    # --- halves and outcomes ----------------------------------------------------------------------------------

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        results = await self.writer.put(transactions, now_us)
        stored = [result for result in results if isinstance(result, PutResult)]
        for result in stored:
            result.shard = self.shard
        if len(stored) < len(results):
            raise PartlyStored(results)
        return stored

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

        known = await self._read(lambda connection: _first_rows(connection, names, _t.state))
        return [State[known[name]] if name in known else None for name in names]

    async def producer_groups(self, ids_: Sequence[bytes]) -> list[str | None]:
        names = [ids.to_text(i) for i in ids_]
        known = await self._read(lambda connection: _first_rows(connection, names, _t.producer_group))
        return [known.get(name) or None for name in names]

    def _rows_of(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """All rows of transactions, in message order; on a connection of its own."""
        with self.engine.begin() as connection:
            return _rows(connection, names)

    # --- checks -----------------------------------------------------------------------------------------------

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        if limit <= 0 or now_us < self._look_us.get(producer_group, 0):
            return []

        def claim(connection: Connection) -> list[Due]:
            wanted = (
                sa.select(_t.transaction_id, _t.source, _t.instance, _t.attempts)
                .where(_t.producer_group == producer_group, _t.next_check_us <= now_us, _t.message_no == 0)
                .order_by(_t.next_check_us)
                .limit(limit)
                .with_for_update(skip_locked=True)
            )
            rows = connection.execute(wanted).all()
            if not rows:
                return []
            names = [str(row[0]) for row in rows]
            tokens = {name: new_token() for name in names}
            for first in range(0, len(names), IDS_A_STATEMENT):
                some = names[first : first + IDS_A_STATEMENT]
                asked = sa.case({name: tokens[name] for name in some}, value=_t.transaction_id, else_=_t.token)
                connection.execute(
                    server_half_message.update()
                    .where(_t.transaction_id.in_(some), _t.message_no == 0)
                    .values(token=asked, next_check_us=now_us + answer_within_us)
                )
            topics: dict[str, dict[str, None]] = {}
            for name, topic in connection.execute(
                sa.select(_t.transaction_id, _t.topic)
                .where(_t.transaction_id.in_(names))
                .order_by(_t.transaction_id, _t.message_no)
            ):
                topics.setdefault(str(name), {})[str(topic)] = None
            return [
                Due(
                    ids.from_text(str(name)),
                    tokens[str(name)],
                    str(source),
                    str(instance),
                    int(attempts),
                    tuple(topics.get(str(name), ())),
                    self.shard,
                )
                for name, source, instance, attempts in rows
            ]

        claimed = await self._read(claim)
        if len(claimed) < limit:
            self._look_us[producer_group] = now_us + LOOK_EVERY_US
        return claimed

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        def release(connection: Connection) -> None:
            for due in claimed:
                connection.execute(
                    server_half_message.update()
                    .where(_message_0(due.id), _t.token == due.token, _t.next_check_us.is_not(None))
                    .values(token=0, next_check_us=due_us)
                )

        await self._read(release)

    async def answer_check(self, answer: CheckAnswer) -> bool:
        state = (State.PARKED if answer.park else State.PREPARED).name

        def record(connection: Connection) -> bool:
            fenced = server_half_message.update().where(
                _message_0(answer.id), _t.token == answer.token, _t.state.in_(UNDECIDED)
            )
            values = {
                "token": 0,
                "next_check_us": answer.next_check_us,
                "attempts": answer.attempts,
            }
            if connection.execute(fenced.values(values)).rowcount != 1:
                return False
            _set_state(connection, answer.id, state)
            return True

        return answer.token > 0 and await self._read(record)

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        def read(connection: Connection) -> Checking | None:
            row = connection.execute(
                sa.select(_t.token, _t.attempts, _t.state, _t.producer_group).where(_message_0(transaction_id))
            ).one_or_none()
            if row is None or row[2] not in UNDECIDED:
                return None
            # Up to 0.1.0 a token that was given back stayed as a negative number.
            return Checking(max(0, int(row[0])), int(row[1]), row[2] == State.PARKED.name, str(row[3]))

        return await self._read(read)

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, anew: bool) -> bool:
        def resume(connection: Connection) -> bool:
            values: dict[str, Any] = {"token": 0, "next_check_us": now_us}
            if anew:
                values["attempts"] = 0
            found = connection.execute(
                server_half_message.update().where(_message_0(transaction_id), _t.state.in_(UNDECIDED)).values(values)
            ).rowcount
            if found and anew:
                _set_state(connection, transaction_id, State.PREPARED.name)
            return bool(found)

        self._look_us.clear()
        return await self._read(resume)

    async def half_payloads(self, claimed: Sequence[Due]) -> list[list[bytes]]:
        names = [ids.to_text(due.id) for due in claimed]
        found = await self._read(lambda connection: _rows(connection, names))
        return [[payload_of(row) for row in found.get(name, [])] for name in names]

    def next_check_us(self, producer_group: str) -> int | None:
        return self._look_us.get(producer_group, 0)

    # --- for the administrator --------------------------------------------------------------------------------

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        name = ids.to_text(transaction_id)
        rows = (await self._read(lambda connection: _rows(connection, [name]))).get(name)
        return _transaction(rows, self.shard) if rows else None

    async def in_doubt(self) -> InDoubt:
        return await counted(self)

    async def undecided(
        self, state: State | None, producer_group: str | None, older_than_us: int | None, limit: int
    ) -> list[Transaction]:
        wanted = sa.select(_t.transaction_id).where(_t.next_check_us.is_not(None), _t.message_no == 0)
        if state is not None:
            wanted = wanted.where(_t.state == state.name)
        if producer_group is not None:
            wanted = wanted.where(_t.producer_group == producer_group)
        if older_than_us is not None:
            wanted = wanted.where(_t.created_at <= moment_of(older_than_us))
        wanted = wanted.order_by(_t.transaction_id).limit(limit)

        def read(connection: Connection) -> list[Transaction]:
            names = [str(name) for name in connection.scalars(wanted)]
            found = _rows(connection, names)
            return [_transaction(found[name], self.shard) for name in names if name in found]

        return await self._read(read)

    # --- retention --------------------------------------------------------------------------------------------

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Another retention from now on; how much room a database takes is not bounded here."""
        self._retention_us = retention_us

    async def retain(self, now_us: int) -> int:
        """Delete transactions that were decided before the retention, and that nobody has to read any more."""
        if not self._retention_us:
            return 0
        before_us = now_us - self._retention_us
        deleted = 0
        for _ in range(PURGE_ROUNDS):
            names = await self._read(lambda connection: self._old(connection, before_us))
            if names:
                deleted += await self._read(lambda connection, names=names: _delete(connection, names))  # type: ignore[misc]
            if len(names) < PURGE_TRANSACTIONS:
                break
        return deleted

    def _old(self, connection: Connection, before_us: int) -> list[str]:
        """Ids rise with time, so the primary key finds the oldest. What a bridge or relay has not read, stays."""
        read_us = before_us
        relayed = _t.relayed != 0
        if self.engine.dialect.name in ("mysql", "mariadb"):
            read_us = min(before_us, read_through_us(connection))
            relayed = sa.true()
        highest = ids.to_text(max(0, before_us // 1000).to_bytes(6) + bytes(10))
        rows = connection.scalars(
            sa.select(_t.transaction_id)
            .where(_t.transaction_id < highest, _t.message_no == 0, _t.next_check_us.is_(None))
            .where(
                sa.or_(
                    sa.and_(_t.state == "ROLLED_BACK", _t.decided_at < moment_of(before_us)),
                    sa.and_(_t.state == "COMMITTED", relayed, _t.decided_at < moment_of(max(0, read_us))),
                )
            )
            .order_by(_t.transaction_id)
            .limit(PURGE_TRANSACTIONS)
        )
        return [str(name) for name in rows]


def _message_0(transaction_id: bytes) -> Any:
    return sa.and_(_t.transaction_id == ids.to_text(transaction_id), _t.message_no == 0)


def _first_rows(connection: Connection, names: Sequence[str], column: Any) -> dict[str, str]:
    """A column of the first row of each transaction that is there, by id."""
    known: dict[str, str] = {}
    for first in range(0, len(names), IDS_A_STATEMENT):
        some = names[first : first + IDS_A_STATEMENT]
        rows = connection.execute(
            sa.select(_t.transaction_id, column).where(_t.transaction_id.in_(some), _t.message_no == 0)
        )
        known.update((str(r[0]), str(r[1])) for r in rows)
    return known


def _set_state(connection: Connection, transaction_id: bytes, state: str) -> None:
    """All of a transaction's rows say the same."""
    connection.execute(
        server_half_message.update()
        .where(_t.transaction_id == ids.to_text(transaction_id), _t.state != state)
        .values(state=state)
    )


def _rows(connection: Connection, names: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for first in range(0, len(names), 500):
        rows = connection.execute(
            sa.select(server_half_message)
            .where(_t.transaction_id.in_(names[first : first + 500]))
            .order_by(_t.transaction_id, _t.message_no)
        ).mappings()
        for row in rows:
            found.setdefault(str(row["transaction_id"]), []).append(row)
    return found


def _delete(connection: Connection, names: Sequence[str]) -> int:
    return int(connection.execute(server_half_message.delete().where(_t.transaction_id.in_(names))).rowcount)


def _transaction(rows: Sequence[Any], shard: str) -> Transaction:
    first = rows[0]
    transaction_id = ids.from_text(first["transaction_id"])
    decided_us = microseconds_of(first["decided_at"])
    return Transaction(
        transaction_id,
        first["producer_group"],
        State[first["state"]],
        microseconds_of(first["created_at"]),
        decided_us,
        first["source"],
        first["instance"],
        first["attempts"],
        first["next_check_us"] or 0,
        [
            StoredMessage(
                row["topic"], 0, 0, transaction_id, row["message_no"], decided_us, payload_of(row), tag_hash(row["tag"])
            )
            for row in rows
        ],
        shard,
    )
