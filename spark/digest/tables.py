"""A digest of a service's tables, computed in their databases: local rows and effects, slot by slot.

A query reads one range of a table; several run at once, in threads, while Spark reads the log.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox
from notify.spark.digest import hashes
from notify.spark.digest.slots import SLOT_CHARACTERS, SlotRange, slot_at, slot_of
from notify.spark.inputs.databases import Database
from notify.spark.inputs.expressions import Expressions
from notify.spark.inputs.ranges import FIRST_ID, LAST_ID, Span, conditions_of, id_at, made_us

MOST_QUERIES = 4096
_SETTINGS = {
    # A hash table of few groups is quicker than sorting all rows, and only this query uses the session.
    "postgresql": ("SET enable_sort = off", "SET max_parallel_workers_per_gather = 0")
}


@dataclass(frozen=True)
class LocalSlot:
    """The local rows of one producer group in a slot."""

    committed: int
    hash: int
    """XOR over the topics, of the hash of what they have: see `topic_text`."""
    digests: int
    """How many of the committed rows have a digest."""
    tombstones: int
    tombstones_hash: int
    odd: int
    """Rows of another state, or whose time is none."""
    first_us: int
    last_us: int


@dataclass
class EffectSlot:
    """The inbox rows of one consumer group in a slot."""

    count: int = 0
    hash: int = 0
    replays: int = 0
    """Rows of effects that were repeated on purpose; they are not in the others."""
    first_us: int = 1 << 62
    last_us: int = 0
    undated: int = 0
    """Rows whose time is none."""


@dataclass
class TableSlots:
    """A digest of one database."""

    local: dict[tuple[int, str], LocalSlot] = field(default_factory=dict)
    """By slot and producer group."""
    effects: dict[tuple[int, str], EffectSlot] = field(default_factory=dict)
    """By slot and consumer group."""
    producer_groups: set[str] = field(default_factory=set)
    beginnings: set[str] = field(default_factory=set)
    """The first characters of invalid ids."""
    mixed: set[int] = field(default_factory=set)
    """Slots whose ids have letters in upper and in lower case, in a database that does not distinguish them."""


def topic_text(combined: int, count: int, topic: str) -> str:
    """The text whose hash stands for the messages of a topic: what is combined of their hashes, and how many."""
    return f"{combined}:{count}:{topic}"


def _id_at_slot(slot: int) -> str:
    """The lowest id of a slot."""
    return id_at(SlotRange(slot, slot).start_us)


class TableDigest:
    """Queries for the digest of one database, and their answers."""

    def __init__(self, database: Database, span: Span | None) -> None:
        """`span`: only rows with ids of that time; None: all rows."""
        self._database = database
        self._kind = database.kind
        self._sql = Expressions(database.kind)
        self._span = span
        self.slots = TableSlots()

    def start(self, pool: ThreadPoolExecutor) -> list[Future[Callable[[], None]]]:
        """Begin the queries. Each result, called in one thread, adds an answer to `slots`."""
        begun = []
        tables = self._database.tables
        if half_message.name in tables:
            odd = self._database.odd_ids(half_message, self._span)
            for condition in conditions_of("transaction_id", self._id_edges()) + odd:
                begun.append(pool.submit(self._ask, self._local_query(condition), self._take_local))
        if notify_inbox.name in tables:
            for condition in conditions_of("created_at", self._time_edges()) + self._database.undated(self._span):
                begun.append(pool.submit(self._ask, self._effects_query(condition), self._take_effects))
        return begun

    def _ask(self, query: str, take: Callable[[Sequence[sa.Row[Any]]], None]) -> Callable[[], None]:
        self._database.pace.wait()
        with self._database.reading() as connection:
            for setting in _SETTINGS.get(self._kind, ()):
                connection.exec_driver_sql(setting)
            if self._kind == "sqlite":
                _give_functions(connection)
            return functools.partial(take, connection.exec_driver_sql(query).all())

    # --- ranges -----------------------------------------------------------------------------------------------

    def _id_edges(self) -> list[str]:
        """Ids between which a query reads: at the borders of slots, since what a query says of a slot is final."""
        span = None if self._span is None else SlotRange(slot_at(self._span.start_us), slot_at(self._span.end_us) + 1)
        first, last = ("", "") if span is None else (id_at(span.start_us), id_at(span.end_us))
        within = conditions_of("transaction_id", [first or FIRST_ID, last or LAST_ID])[0]
        low, high = (made_us(text) for text in self._extent(half_message.c.transaction_id, within))
        if low is None or high is None:
            return [first, last]
        edges = self._database.parts.edges(
            half_message.c.transaction_id, slot_at(low), slot_at(high) + 1, _id_at_slot, MOST_QUERIES
        )
        return [first, *map(_id_at_slot, edges[1:-1]), last]

    def _time_edges(self) -> list[str]:
        return self._database.parts.by_time(notify_inbox.c.created_at, self._span)

    def _extent(self, column: sa.Column[Any], condition: str) -> Sequence[Any]:
        table = self._database.in_schema(column.table.name)
        query = f"SELECT min({column.name}), max({column.name}) FROM {table} WHERE {condition}"
        return self._database.rows(query)[0]

    # --- queries ----------------------------------------------------------------------------------------------

    def _hash(self, text: str) -> str:
        return hashes.of_sql(self._kind, text)

    def _xor(self, values: str) -> str:
        return hashes.xor_of_sql(self._kind, values)

    def _local_query(self, condition: str) -> str:
        """Rows (slot, group, committed, hash, digests, tombstones, their hash, odd, first, last) of a range.

        The topics are combined there: this process would have to hold each topic of each slot.
        """
        join = functools.partial(hashes.joined_by_sql, self._kind)
        has_digests = self._database.has_digests
        message = ["transaction_id", "'.'", self._text("message_no")]
        if has_digests:
            contents = hashes.contents_of_sql(self._kind)
            message.append(f"COALESCE({join(repr(':'), self._text(contents))}, '')")
        inner = (
            f"SELECT substr(transaction_id, 1, {SLOT_CHARACTERS}) AS slot, producer_group, topic, state, "
            f"COUNT(*) AS n, {self._xor(self._hash(join(*message)))} AS x, "
            f"{'COUNT(digest)' if has_digests else '0'} AS digests, MIN(created_at) AS low, MAX(created_at) AS high, "
            f"SUM({self._is_undated}) AS undated "
            f"FROM {self._database.in_schema(half_message.name)} WHERE {condition} GROUP BY 1, 2, 3, 4"
        )
        of_topic = self._hash(join(self._text("x"), "':'", self._text("n"), "':'", "topic"))

        def of(state: str, value: str, otherwise: str = "") -> str:
            return f"CASE WHEN state = '{state}' THEN {value}{otherwise} END"

        return (
            f"SELECT slot, producer_group, SUM({of('COMMITTED', 'n', ' ELSE 0')}), "
            f"{self._xor(of('COMMITTED', of_topic))}, SUM({of('COMMITTED', 'digests', ' ELSE 0')}), "
            f"SUM({of('ROLLED_BACK', 'n', ' ELSE 0')}), {self._xor(of('ROLLED_BACK', 'x'))}, "
            "SUM(CASE WHEN state IN ('COMMITTED', 'ROLLED_BACK') THEN undated ELSE n END), "
            f"{self._sql.microseconds('MIN(low)')}, {self._sql.microseconds('MAX(high)')} "
            f"FROM ({inner}) topics GROUP BY slot, producer_group"
        )

    @property
    def _is_undated(self) -> str:
        """1 for a row whose time is none, as an expression of SQL."""
        return f"CASE WHEN {self._sql.is_instant('created_at')} THEN 0 ELSE 1 END"

    def _effects_query(self, condition: str) -> str:
        """Rows (slot, group, count, hash, replays, undated, first, last) of a range."""
        of_effect = f"CASE WHEN replay = 0 THEN {self._hash('message_id')} END"
        return (
            f"SELECT substr(message_id, 1, {SLOT_CHARACTERS}), consumer_group, "
            "SUM(CASE WHEN replay = 0 THEN 1 ELSE 0 END), "
            f"{self._xor(of_effect)}, "
            f"SUM(CASE WHEN replay = 0 THEN 0 ELSE 1 END), SUM({self._is_undated}), "
            f"{self._sql.microseconds('MIN(created_at)')}, {self._sql.microseconds('MAX(created_at)')} "
            f"FROM {self._database.in_schema(notify_inbox.name)} WHERE {condition} GROUP BY 1, 2"
        )

    def _text(self, number: str) -> str:
        return f"({number})::text" if self._kind == "postgresql" else f"CAST({number} AS CHAR)"

    # --- answers ----------------------------------------------------------------------------------------------

    def _take_local(self, rows: Sequence[sa.Row[Any]]) -> None:
        self.slots.producer_groups.update(str(row.producer_group) for row in rows)
        for slot, name, *values in self._sound(rows):
            known = LocalSlot(*[int(value or 0) for value in values])
            if (slot, name) in self.slots.local:
                self.slots.mixed.add(slot)
            self.slots.local[slot, name] = known

    def _take_effects(self, rows: Sequence[sa.Row[Any]]) -> None:
        for slot, name, count, combined, replays, undated, first_us, last_us in self._sound(rows):
            known = self.slots.effects.setdefault((slot, name), EffectSlot())
            known.count += int(count)
            known.hash ^= int(combined or 0)
            known.replays += int(replays)
            known.undated += int(undated)
            known.first_us = min(known.first_us, int(first_us or 0))
            known.last_us = max(known.last_us, int(last_us or 0))

    def _sound(self, rows: Sequence[sa.Row[Any]]) -> Iterator[tuple[Any, ...]]:
        """The rows whose slot is one."""
        for row in rows:
            slot = slot_of(row[0])
            if slot is None:
                self.slots.beginnings.add(row[0])
            else:
                yield slot, *tuple(row)[1:]


class _Xor:
    """The aggregate that SQLite lacks."""

    def __init__(self) -> None:
        self._combined: int | None = None

    def step(self, value: int | None) -> None:
        if value is not None:
            self._combined = value ^ (self._combined or 0)

    def finalize(self) -> int | None:
        return self._combined


def _give_functions(connection: sa.Connection) -> None:
    driver: Any = connection.connection.driver_connection
    driver.create_function(hashes.SQLITE_HASH, 1, _hash_or_none, deterministic=True)
    driver.create_function(hashes.SQLITE_CONTENTS, 3, _contents_or_none, deterministic=True)
    driver.create_aggregate(hashes.SQLITE_XOR, 1, _Xor)


def _hash_or_none(text: str | None) -> int | None:
    return None if text is None else hashes.of_text(text)


def _contents_or_none(digest: int | None, key: str | None, tag: str | None) -> int | None:
    return None if digest is None else hashes.of_contents(digest, key, tag)
