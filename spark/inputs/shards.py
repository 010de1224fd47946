"""Storages as shards: the ids that their bridges and relays use, and the storages that were not given.

The key map of the registry names all shards, and a local row names the shards of its messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import sqlalchemy as sa

from notify.client.tables.definitions import half_message
from notify.spark.checks.outbox_waiting import bridged_us, bridges_of
from notify.spark.inputs.databases import Database
from notify.spark.inputs.ranges import id_at
from notify.spark.result import Covered, Inputs, Result
from notify.spark.times import instant_text
from notify.storage.sql.movers import is_past
from notify.storage.sql.rows import microseconds_of
from notify.storage.sql.tables import server_half_message, server_key_map, server_member, server_shard

SAMPLED = 1000
"""How many local rows are read at each end of the range."""
MANY = 10
"""If a storage has none of this many expected transactions, it is not the expected storage."""
FIRST_HALVES = 1000
"""How many of a storage's first halves tell from when on it has all."""
KEPT_US = 86_400_000_000
"""The shortest time for which a storage keeps halves that were sent on."""


@dataclass(frozen=True)
class Shard:
    """A database that servers use as storage: its name as a shard, and the source id of its bridge or relay."""

    name: str
    source: str


def shard_of(database: Database) -> Shard | None:
    """The shard that a database is; None if no server uses the database as storage."""
    if server_shard.name not in database.tables:
        return None
    with database.reading() as connection:
        row = connection.execute(sa.select(server_shard.c.name, server_shard.c.source)).first()
    return None if row is None else Shard(str(row[0]), str(row[1]))


def movers_of(inputs: Inputs) -> dict[str, str]:
    """The ids that bridges and relays of given storages use as source, each with the name of the input.

    A message with such an id may be from any database.
    """
    candidates = [(f"storage {storage.name}", storage) for storage in inputs.storages]
    candidates += [(f"database {database.name}", database) for database in inputs.databases]
    movers: dict[str, str] = {}
    for name, database in candidates:
        if shard := shard_of(database):
            movers.setdefault(shard.source, name)
    return movers


def ids_of(database: Database) -> set[str]:
    """The ids that a bridge or relay of a database may use as source."""
    shard = shard_of(database)
    return {source for source in (database.source_id(), shard.source if shard else "") if source}


def halves_from_us(storages: Sequence[Database]) -> int:
    """The instant (microseconds since 1970) from which on these storages have all halves; 0 if there is no storage.

    Retention deletes older halves without a record: those that began and were decided before an instant, in the order
    of their ids. So what began after the decision of a half that it would delete, and has not deleted, is there.
    """
    oldest: list[int] = []
    t = server_half_message.c
    for storage in storages:
        with storage.reading() as connection:
            past = sa.select(t.decided_at).where(is_past(connection))
            first = past.order_by(t.transaction_id).limit(FIRST_HALVES).subquery()
            decided_at = connection.execute(sa.select(sa.func.min(first.c.decided_at))).scalar()
        oldest.append(storage.now_us if decided_at is None else microseconds_of(decided_at))
    return max(oldest, default=0)


def names_of(storages: Sequence[Database]) -> set[str]:
    """The names of these storages as shards."""
    return {shard.name for storage in storages if (shard := shard_of(storage))}


def missing_storages(inputs: Inputs, result: Result, from_us: int, to_us: int) -> bool:
    """Note the storages that were not given. Returns whether there are any.

    `from_us`, `to_us`: the audited range; shards that ended before it are not expected.
    """
    given = names_of(inputs.storages)
    absent: dict[str, str] = {}
    for storage in inputs.storages:
        for name, list_name in _expected(storage, given, from_us):
            absent.setdefault(name, f"{list_name} of storage {storage.name}")
    sampled: dict[str, set[str]] = {}
    for database in inputs.databases if inputs.storages or not inputs.logs else ():
        for name, ids in _sampled(database, from_us, to_us).items():
            sampled.setdefault(name, set()).update(ids)
            if not inputs.logs:  # otherwise a log may be the shard, see missing_logs.py
                absent.setdefault(name, f"the local rows of database {database.name}")
    for name in sorted(absent.keys() - given):
        result.reasons.append(
            f"shard {name} is named by {absent[name]}, and no given storage has this name: name its database with "
            "--storage; its halves and their outcomes were not read"
        )
        _cover(result, f"shard {name}", f"the storage named by {absent[name]}", "not given")
    lacks_any = bool(absent.keys() - given) | _unnamed_storages(inputs, result) | _wiped(inputs, result, from_us)
    lacks_any |= _strange(inputs, sampled, result)
    has_map = any(_has_rows(storage, server_key_map) for storage in inputs.storages)
    if not has_map and any(_has_rows(storage, server_half_message) for storage in inputs.storages):
        lacks_any = True
        result.reasons.append(
            "no given storage has the key map that names all shards: name the database of the servers' registry with "
            "--storage, too"
        )
        _cover(result, "all storages", "the key map", "in no given storage")
    return lacks_any


def _wiped(inputs: Inputs, result: Result, from_us: int) -> bool:
    """Note the storages that have no half although queues have recent messages of theirs."""
    wiped = False
    for storage in inputs.storages:
        shard = shard_of(storage)
        if shard is None or _has_rows(storage, server_half_message):
            continue
        sent_us = [max(log.sent().get(shard.source, {}).values(), default=0) for log in inputs.logs]
        sent_us.append(bridged_us([shard.source], bridges_of(inputs.logs, inputs.kafka)))
        # If the newest message is older, retention may have emptied the storage.
        if max(sent_us) >= max(from_us, storage.now_us - KEPT_US):
            wiped = True
            result.reasons.append(
                f"storage {storage.name}: server_half_message is empty, and a queue has messages that came from it "
                f"until {instant_text(max(sent_us))}: its halves were deleted, or this is another storage"
            )
            _cover(result, f"storage {storage.name}", "halves and outcomes", "no row")
    return wiped


def _unnamed_storages(inputs: Inputs, result: Result) -> bool:
    """Note the given databases that are storages, too, but were not given with --storage."""
    given = {shard.source for storage in inputs.storages if (shard := shard_of(storage))}
    unnamed = [
        database.name
        for database in inputs.databases
        if (shard := shard_of(database)) and shard.source not in given and _has_rows(database, server_half_message)
    ]
    for name in unnamed:
        result.reasons.append(
            f"database {name} is a storage of servers, too, and its halves were not read: name it with --storage, too"
        )
        _cover(result, f"database {name}", "its halves", "not given with --storage")
    return bool(unnamed)


def _sampled(database: Database, from_us: int, to_us: int) -> dict[str, set[str]]:
    """By shard: the committed transactions with a half among the oldest and the newest local rows of the range."""
    if half_message.name not in database.tables:
        return {}
    columns = half_message.c
    transaction_id = columns.transaction_id
    in_range = (transaction_id >= id_at(from_us), transaction_id < id_at(to_us))
    rows = sa.select(transaction_id, columns.shards, columns.mode, columns.state).where(*in_range).limit(SAMPLED)
    by_shard: dict[str, set[str]] = {}
    with database.reading() as connection:
        for order in (transaction_id, transaction_id.desc()):
            for transaction, shards, mode, state in connection.execute(rows.order_by(order)):
                if (mode, state) == ("half", "COMMITTED") and shards:
                    for shard in shards.split(","):
                        by_shard.setdefault(shard, set()).add(transaction)
    return by_shard


def _strange(inputs: Inputs, sampled: Mapping[str, set[str]], result: Result) -> bool:
    """Note the storages that have no half although local rows name their shard. Returns whether there are any."""
    strange = False
    for storage in inputs.storages:
        shard = shard_of(storage)
        first = id_at(halves_from_us([storage]))
        ids = [transaction for transaction in sampled.get(shard.name, ()) if transaction >= first] if shard else []
        if shard is None or len(ids) < MANY:
            continue
        column = server_half_message.c.transaction_id
        with storage.reading() as connection:
            has_any = connection.execute(sa.select(column).where(column.in_(ids)).limit(1)).first() is not None
        if not has_any:
            strange = True
            result.reasons.append(
                f"storage {storage.name} has the name of shard {shard.name}, but none of the {len(ids)} halves that "
                "local rows say are there: it belongs to another cluster, or is an older copy"
            )
            _cover(result, f"storage {storage.name}", "halves of the local rows", "none of them")
    return strange


def _cover(result: Result, name: str, expected: str, read: str) -> None:
    result.coverage.append(Covered(name, "storage", expected, read, is_whole=False))


def _expected(storage: Database, given: set[str], from_us: int) -> Iterator[tuple[str, str]]:
    """The shards that a registry has named since `from_us`, each with the list that names it."""
    for name in _in_maps(storage, from_us):
        yield name, "the key map"
    if server_member.name not in storage.tables:
        return
    columns = server_member.c
    with storage.reading() as connection:
        rows = connection.execute(sa.select(columns.roles, columns.shards).where(columns.kind == "server")).all()
    for roles, shards in rows:
        names = shards.split(",")
        # Servers with a log of their own may be in the registry, too; only those that use a given storage count.
        if "transactions" in roles.split(",") and given & set(names):
            yield from ((name, "the list of servers") for name in names if name)


def _in_maps(storage: Database, from_us: int) -> Iterator[str]:
    """The shards of all versions of the key map that were valid at or after `from_us`."""
    if server_key_map.name not in storage.tables:
        return
    columns = server_key_map.c
    with storage.reading() as connection:
        rows = connection.execute(sa.select(columns.shards, columns.made_at).order_by(columns.version)).all()
    for (shards, _), (_, replaced_at) in pairwise([*rows, ("", None)]):
        if replaced_at is None or microseconds_of(replaced_at) >= from_us:
            yield from json.loads(shards)


def _has_rows(storage: Database, table: sa.Table) -> bool:
    return table.name in storage.tables and storage.has_rows(table)
