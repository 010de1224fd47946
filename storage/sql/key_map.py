"""Which shard a key belongs to, by version, and how a new version replaces an old one without mixing order.

A change has steps. The first server that finds a step done records it in the registry:

1. followed: every server with a recent heartbeat sends by the new version, and nothing that it sent by the old one is
   on its way. From its own step on, a server refuses (retryable) transactions with a key that moves.
2. settled: transactions that were prepared under the old version are decided. Those in doubt after SETTLE_SECONDS are
   not waited for: the order of a key never includes transactions whose producer does not know their outcome.
3. drained: a bridge or relay has put into the queue what was committed until then. Now keys that moved are accepted.

A server that has not reached the registry for LEASE_SECONDS refuses keys, because it cannot know the map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.errors import Conflict, InvalidRequest
from notify.protocol import ids
from notify.storage.members import Member
from notify.storage.sql import registry
from notify.storage.sql.movers import has_moved
from notify.storage.sql.rows import microseconds_of, moment_of
from notify.storage.sql.tables import server_half_message, server_key_map, server_key_map_change, server_member

LEASE_SECONDS = 20.0
SETTLE_SECONDS = 30.0
CLOCKS_US = 2_000_000
"""The largest difference between the clocks of two databases; servers warn above a second."""
IDS_MS = 600_000
"""How far the time in an id may be before its storage: late clocks of producers, and long transactions."""
FOLLOWS = "key_map"
"""The field of a server's heartbeat with the oldest version by which it has something on its way."""

_t, _c = server_half_message.c, server_key_map_change.c


@dataclass(frozen=True, slots=True)
class KeyMap:
    """One version. `previous`: the shards of the previous version while a change is under way; otherwise empty."""

    version: int = 0
    shards: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    followed_us: int = 0
    settled_us: int = 0

    @property
    def waits_for(self) -> str:
        """Why the change waits; "" if no change is under way."""
        if not self.previous:
            return ""
        if not self.followed_us:
            return "servers to follow"
        if not self.settled_us:
            return "what was prepared before it to be decided"
        return "what was committed before it to reach the queue"


def newest(connection: Connection) -> KeyMap:
    """The valid version; version 0 without shards if there is none."""
    row = connection.execute(
        sa.select(server_key_map.c.version, server_key_map.c.shards, server_key_map_change)
        .outerjoin(server_key_map_change, _c.of_version == server_key_map.c.version)
        .order_by(server_key_map.c.version.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return KeyMap()
    shards = tuple(json.loads(row.shards))
    if row.of_version is None or row.drained_at is not None:
        return KeyMap(int(row.version), shards)
    return KeyMap(
        int(row.version),
        shards,
        tuple(json.loads(row.previous)),
        microseconds_of(row.followed_at) if row.followed_at is not None else 0,
        microseconds_of(row.settled_at) if row.settled_at is not None else 0,
    )


def is_in_use(connection: Connection) -> bool:
    """Whether servers use or have used this database."""
    server = sa.select(server_member.c.name).where(server_member.c.kind == "server")
    half = sa.select(_t.transaction_id)
    if newest(connection).version:
        return True
    return any(connection.execute(rows.limit(1)).first() is not None for rows in (half, server))


def make_first(connection: Connection, shards: Sequence[str]) -> None:
    """Record the map of a registry that has none, so that a shard added later does not move keys.

    Raises IntegrityError if another server does so at the same time.
    """
    if newest(connection).version == 0:
        _insert(connection, 1, shards)


def change(connection: Connection, shards: Sequence[str]) -> int:
    """Add the next version and return its number. It is valid for a key that moves once the change has ended.

    Raises InvalidRequest for an impossible map, Conflict while another change is under way.
    """
    if not shards or len(set(shards)) != len(shards):
        raise InvalidRequest("a key map names at least one shard, and each once")
    known = {shard for m in registry.members(connection) if _is_sender(m) for shard in m.shards}
    unknown = [shard for shard in shards if shard not in known]
    if known and unknown:
        raise InvalidRequest(
            f"no running server knows shard {', '.join(unknown)}: correct the name, or start servers whose "
            "--storage has it first"
        )
    now = newest(connection)
    if not now.version:
        raise InvalidRequest("this database has no key map: it is not the registry, or no server has used it yet")
    if now.previous:
        raise Conflict(
            f"the change to version {now.version} of the key map is still under way: it waits for {now.waits_for}. "
            "Wait, or undo it with `notify storage key-map --take-back`"
        )
    try:
        _insert(connection, now.version + 1, shards)
    except sa.exc.IntegrityError:
        raise Conflict("another server changed the key map at the same time; try again") from None
    previous = json.dumps(list(now.shards))
    connection.execute(server_key_map_change.insert().values(of_version=now.version + 1, previous=previous))
    return now.version + 1


def take_back(connection: Connection) -> int:
    """Undo the change that is under way, by a new version with the previous shards; returns its number.

    Nothing has moved by then, because a key that moves is refused until the change has ended. Raises Conflict
    if no change is under way, or it has just ended.
    """
    now = newest(connection)
    if not now.previous:
        raise Conflict(f"no change of the key map is under way: version {now.version} is valid")
    # A server that records the last step now either waits for this row, or has already recorded it.
    unfinished = server_key_map_change.delete().where(_c.of_version == now.version, _c.drained_at.is_(None))
    if not connection.execute(unfinished).rowcount:
        raise Conflict(f"the change to version {now.version} of the key map has just ended: change the map again")
    _insert(connection, now.version + 1, now.previous)
    return now.version + 1


def _insert(connection: Connection, version: int, shards: Sequence[str]) -> None:
    at = registry.now(connection)
    connection.execute(server_key_map.insert().values(version=version, shards=json.dumps(list(shards)), made_at=at))


def advance(connection: Connection, key_map: KeyMap, engines: Mapping[str, Engine]) -> None:
    """Take the next step of a change if it is due. `connection`: to the registry; `engines`: of the shards, by name.

    Any server may do this at any time. If a shard does not answer, it raises SQLAlchemy's error; try again later.
    """
    at = registry.now(connection)
    if not key_map.followed_us:
        servers = registry.members(connection, within=LEASE_SECONDS + registry.GONE_SECONDS)
        senders = [member for member in servers if _is_sender(member)]
        done = all(int(s.detail.get(FOLLOWS, 0)) >= key_map.version for s in senders)
        step: dict[str, Any] = {"followed_at": at}
    elif not key_map.settled_us:
        over = microseconds_of(at) - key_map.followed_us > SETTLE_SECONDS * 1e6
        until = key_map.followed_us + CLOCKS_US
        done = over or not any(_is_open(engines[shard], until) for shard in key_map.previous)
        step = {"settled_at": at}
    else:
        until = key_map.settled_us + CLOCKS_US
        done = all(_is_read(engines[shard], until) for shard in key_map.previous)
        step = {"drained_at": at}
    if done:
        name = next(iter(step))
        connection.execute(
            server_key_map_change.update()
            .where(_c.of_version == key_map.version, server_key_map_change.c[name].is_(None))
            .values(step)
        )


def _is_sender(member: Member) -> bool:
    return member.kind == "server" and "transactions" in member.roles


def _is_open(engine: Engine, until_us: int) -> bool:
    """Whether a transaction with a key, prepared before the instant but not long before, is undecided."""
    begun = moment_of(until_us) - timedelta(seconds=2 * SETTLE_SECONDS)
    # Ids rise with their producers' clocks, so the primary key finds young rows without a scan.
    lowest = ids.to_text(max(0, until_us // 1000 - IDS_MS).to_bytes(6) + bytes(10))
    prepared = sa.and_(_t.next_check_us.is_not(None), _t.state == "PREPARED")
    keyed = server_half_message.alias()
    has_key = sa.exists().where(keyed.c.transaction_id == _t.transaction_id, keyed.c.key.is_not(None))
    with engine.connect() as connection:
        found = connection.execute(
            sa.select(_t.transaction_id)
            .where(
                _t.transaction_id > lowest,
                prepared,
                _t.created_at > begun,
                _t.created_at < moment_of(until_us),
                has_key,
            )
            .limit(1)
        ).first()
    return found is not None


def _is_read(engine: Engine, until_us: int) -> bool:
    """Whether everything committed until the instant is in the queue."""
    with engine.connect() as connection:
        return has_moved(connection, until_us)
