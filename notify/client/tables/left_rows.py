"""Rows that a producer group has left behind: reads them in their order, and notes what became of them.

A row that is left behind becomes an ordinary row of mode half in two steps. First it names the shard that has its half,
and then, once the outcome is recorded there, it is marked as sent. Several processes may do this at the same time: the
first shard that is named counts, and what is stored on another one is rolled back by its check.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError

from notify.check.listener import CheckUnavailable
from notify.check.question import read_source
from notify.client.tables.definitions import half_message, is_left_behind, left_behind_with
from notify.client.tables.old_rows import instant_before
from notify.client.tables.outbox import Outbox, among
from notify.client.tables.outbox import Place as Waiting
from notify.client.tables.schemas import Place
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, LeftBehindReport, PackedMessage
from notify.runtime.databases import LEFT_BEHIND, REFUSED, RELAYED, whole
from notify.runtime.schemas import holding, within

LEFT = Outbox(half_message, is_left_behind, half_message.c.created_at, (LEFT_BEHIND,))
Key = tuple[str, str]
"""A topic, and a key in it."""
MOST_GROUPS = 1000
"""The most producer groups of a schema whose rows a relay or bridge sends after a look."""
MOST_LOOKED_AT = 1000
"""The most transactions that a look finds."""
MOST_KEYS = 10_000
"""The most keys that a look finds."""
EARLIER_MS = 30_000
"""How much older than what waits the transactions are whose outcomes may not have reached the server: an outcome is
given up after 10 s, or after 20 s if a thread sent it itself, and then commits leave rows."""
MOST_EARLIER = 20_000
"""The most rows that are read of them, the newest first."""
MOST_NEWEST = 10_000
"""The most rows, of all groups, that are read for the shards that they name."""
_NOT_A_MESSAGE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, DataError)
_c = half_message.c


class Look(NamedTuple):
    """The oldest transactions that wait, the keys of those that wait, whether these are the keys of all, and whether
    this look has read them."""

    places: list[Waiting]
    keys: frozenset[Key]
    are_all: bool
    are_new: bool = True


class Page(NamedTuple):
    """Transactions with the shard that has the half of each ("": none is named), those whose rows are not messages, and
    the id of their source."""

    transactions: list[tuple[BridgedTransaction, str]]
    unreadable: list[str]
    source: str


class Earlier(NamedTuple):
    """A transaction that went the ordinary way, the shard that has its half, and its keys."""

    id: str
    shard: str
    keys: frozenset[Key]


class Counted(NamedTuple):
    """How many transactions a producer group has left behind, and since when, by the database's clock: in RFC 3339, and
    in seconds before now."""

    group: str
    transactions: int
    since: str
    seconds: float


def look(connection: Connection, group: str, before: Look | None = None) -> Look:
    """The rows that a producer group has left behind in a schema.

    `before`: an earlier look, whose keys this one repeats if there are more rows than it finds: their keys take longer
    than anything else, because all that waits is read for them.
    """
    places = LEFT.oldest(connection, MOST_LOOKED_AT, _c.producer_group == group)
    if not places:
        return Look([], frozenset(), True)
    if len(places) < MOST_LOOKED_AT:
        waits = _those_left_behind(connection, [place.id for place in places])
    elif before is not None:
        return Look(places, before.keys, before.are_all, are_new=False)
    else:
        waits = sa.and_(is_left_behind, _c.producer_group == group)
    keyed = sa.select(_c.topic, _c.key).where(waits, _c.key.is_not(None))
    rows = connection.execute(keyed.distinct().limit(MOST_KEYS + 1)).all()
    return Look(places, frozenset((str(topic), str(key)) for topic, key in rows), len(rows) <= MOST_KEYS)


def earlier(connection: Connection, group: str, found: Look) -> list[Earlier]:
    """Transactions with a key of those that a look found, which committed just before them and were not left behind.

    The outcome of one may not have reached the server. Only the process that committed it would know, but that is not
    always the one that sends what it left. Ids rise with time, so that the primary key finds the rows.
    """
    waiting = sorted(place.id for place in found.places)
    valid = [name for name in ids.from_texts(waiting) if isinstance(name, bytes)]
    since = max(0, int.from_bytes(valid[0][:6]) - EARLIER_MS) if valid else 0
    query = sa.select(_c.transaction_id, _c.shards, _c.topic, _c.key).where(
        _c.transaction_id.between(ids.to_text(since.to_bytes(6) + bytes(10)), waiting[-1]),
        _c.producer_group == group,
        _c.relayed == RELAYED,
        _c.mode == "half",
        _c.state == "COMMITTED",
        _c.key.is_not(None),
    )
    rows = connection.execute(query.order_by(_c.created_at.desc(), _c.transaction_id.desc()).limit(MOST_EARLIER)).all()
    shards: dict[str, str] = {}
    keys: dict[str, set[Key]] = {}
    for name, shard, topic, key in reversed(rows):
        shards[str(name)] = str(shard)
        keys.setdefault(str(name), set()).add((str(topic), str(key)))
    return [
        Earlier(name, shards[name], frozenset(its_keys))
        for name, its_keys in keys.items()
        if not found.are_all or not found.keys.isdisjoint(its_keys)
    ]


def groups(connection: Connection) -> list[str]:
    """The producer groups that have left something behind in a schema, MOST_GROUPS at most. Raises SQLAlchemy's error
    also if this role may not note in the rows what becomes of them, and CheckUnavailable if notify_source is empty."""
    connection.execute(half_message.update().where(sa.false()).values(shards="", relayed=RELAYED))
    read_source(connection)
    query = sa.select(_c.producer_group).where(is_left_behind).distinct().order_by(_c.producer_group)
    return [str(group) for group in connection.scalars(query.limit(MOST_GROUPS))]


def named_shards(connection: Connection, group: str) -> set[str]:
    """The shards that a schema's newest rows of a producer group name; empty if none of them names one."""
    newest = sa.select(_c.producer_group, _c.shards).order_by(_c.transaction_id.desc()).limit(MOST_NEWEST).subquery()
    query = sa.select(newest.c.shards).where(newest.c.producer_group == group, newest.c.shards != "").distinct()
    return {shard for shards in connection.scalars(whole(query)) for shard in str(shards).split(",") if shard}


def with_waiting(connection: Connection, schemas: Sequence[str]) -> list[str]:
    """Those of these schemas in which something is left behind, by a few statements for all of them."""
    return holding(connection, {schema: {half_message.name: f"relayed = {LEFT_BEHIND}"} for schema in schemas})


def waiting_keys(connection: Connection, group: str, messages: Sequence[PackedMessage], place: Place) -> frozenset[Key]:
    """The keys of these messages with which a producer group has left transactions behind."""
    columns = within(half_message, place.schema).c if place.is_named else _c
    keys = [message.key for message in messages if message.key is not None]
    query = sa.select(columns.key).where(left_behind_with(columns, group, keys)).distinct()
    left = {str(key) for key in connection.scalars(whole(query))}
    return frozenset((message.topic, message.key) for message in messages if message.key in left)


def read(connection: Connection, transaction_ids: Sequence[str]) -> Page:
    """Those of these transactions that still wait, in this order."""
    shards = shards_of(connection, transaction_ids)
    waiting = [name for name in transaction_ids if name in shards]
    source = read_source(connection)[0]
    try:
        found = LEFT.read(connection, waiting)
        unreadable: list[str] = []
    except _NOT_A_MESSAGE:
        found, unreadable = _one_by_one(connection, waiting)
    return Page([(each, shards[each.id]) for each in found], unreadable, source)


def _one_by_one(connection: Connection, transaction_ids: Sequence[str]) -> tuple[list[BridgedTransaction], list[str]]:
    found, unreadable = [], []
    for name in transaction_ids:
        try:
            found += LEFT.read(connection, [name])
        except _NOT_A_MESSAGE:
            unreadable.append(name)
    return found, unreadable


def name_shards(connection: Connection, shard_by_id: dict[str, str]) -> dict[str, str]:
    """Note the shard that has the half of each transaction, unless another one is named; returns the named ones."""
    by_shard: dict[str, list[str]] = {}
    for name, shard in shard_by_id.items():
        by_shard.setdefault(shard, []).append(name)
    for shard, names in by_shard.items():
        is_unnamed = sa.and_(_those_left_behind(connection, names), _c.shards == "")
        connection.execute(half_message.update().where(is_unnamed).values(shards=shard))
    return shards_of(connection, list(shard_by_id))


def unname_shards(connection: Connection, transaction_ids: Sequence[str]) -> None:
    """The named shard does not know these transactions: it has lost its disk."""
    condition = _those_left_behind(connection, transaction_ids)
    connection.execute(half_message.update().where(condition).values(shards=""))


def shards_of(connection: Connection, transaction_ids: Sequence[str]) -> dict[str, str]:
    """The shards that the rows name of those of these transactions that wait."""
    query = sa.select(_c.transaction_id, _c.shards).where(
        _those_left_behind(connection, transaction_ids), _c.message_no == 0
    )
    return {str(name): str(shards) for name, shards in connection.execute(whole(query))}


def _those_left_behind(connection: Connection, transaction_ids: Sequence[str]) -> Any:
    """The condition for the rows of these transactions that wait. The sum keeps planners from the index of all that
    waits: by their statistics, which may be of the time before the outage, it is empty."""
    return sa.and_(among(connection, _c.transaction_id, transaction_ids), _c.relayed + 0 == LEFT_BEHIND)


def waiting_of(connection: Connection, transaction_ids: Sequence[str], source: str) -> Collection[str] | None:
    """Those of these transactions that wait; None if the connection's schema is not this source."""
    try:
        if read_source(connection)[0] != source:
            return None
    except CheckUnavailable:
        return None
    return shards_of(connection, transaction_ids).keys()


def note(connection: Connection, sent: Sequence[str], refused: Sequence[str]) -> bool:
    """Mark the transactions that were sent, and those that the server refuses permanently; whether none of them was
    marked already, by another process."""
    marked = LEFT.mark(connection, sent, RELAYED) + LEFT.mark(connection, refused, REFUSED)
    return marked >= len(sent) + len(refused)


def counted(connection: Connection, group: str | None = None) -> list[Counted]:
    """Count what each producer group, or one, has left behind in a schema."""
    oldest = sa.func.min(_c.created_at, type_=_c.created_at.type)
    query = sa.select(_c.producer_group, sa.func.count(), oldest).where(is_left_behind, _c.message_no == 0)
    if group is not None:
        query = query.where(_c.producer_group == group)
    rows = connection.execute(whole(query.group_by(_c.producer_group).order_by(_c.producer_group))).all()
    now = instant_before(connection, 0) if rows else None
    return [
        Counted(str(name), int(number), since.isoformat() + "Z", (now - since).total_seconds())
        for name, number, since in rows
    ]


def report(connection: Connection, group: str) -> LeftBehindReport:
    """Report what a producer group has left behind in a schema, for a server's operators."""
    source = read_source(connection)[0]
    found = counted(connection, group)
    if not found:
        return LeftBehindReport(group, source, 0)
    return LeftBehindReport(group, source, found[0].transactions, max(0.0, found[0].seconds))
