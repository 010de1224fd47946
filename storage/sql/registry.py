"""The registry (MetaQ's Config server): members and their heartbeats, in a table of the server's database.

Times are those of the database's clock, so that the members' clocks need not agree.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.errors import Conflict, NotFound
from notify.runtime.databases import INSTANT, database_now
from notify.storage.members import Member
from notify.storage.sql.rows import microseconds_of
from notify.storage.sql.tables import server_member

HEARTBEAT_SECONDS = 1.0
GONE_SECONDS = 5.0
"""A member without a heartbeat for this long is no longer listed for clients."""
FORGOTTEN_SECONDS = 86_400.0

_m = server_member.c


def now(connection: Connection) -> Any:
    """The time of the database's clock, a naive UTC datetime."""
    return connection.execute(sa.select(sa.type_coerce(database_now(), INSTANT))).scalar_one()


def heartbeat(connection: Connection, member: Member) -> None:
    """Record a member's heartbeat."""
    at = now(connection)
    values = {
        "kind": member.kind,
        "url": member.url,
        "roles": ",".join(member.roles),
        "shards": ",".join(member.shards),
        "room": member.room,
        "load": member.load,
        "detail": json.dumps(member.detail),
        "seen_at": at,
    }
    changed = connection.execute(server_member.update().where(_m.name == member.name).values(values)).rowcount
    if not changed:
        connection.execute(server_member.insert().values(name=member.name, started_at=at, **values))


def leave(connection: Connection, name: str) -> None:
    """Remove a member that stops in an orderly way."""
    connection.execute(server_member.delete().where(_m.name == name))


def forget(connection: Connection, name: str) -> None:
    """Remove a bridge or another member that will not come back: nothing waits for it any more.

    Raises NotFound for an unknown name, Conflict for a member with a recent heartbeat.
    """
    at = now(connection)
    seen_at = connection.execute(sa.select(_m.seen_at).where(_m.name == name)).scalar_one_or_none()
    if seen_at is None:
        raise NotFound(f"there is no member {name!r}: see `notify storage nodes`")
    age = (microseconds_of(at) - microseconds_of(seen_at)) / 1e6
    if age < GONE_SECONDS:
        raise Conflict(f"{name!r} sent a heartbeat {age:.1f} s ago: stop it before you remove it")
    leave(connection, name)


def members(connection: Connection, *, within: float = GONE_SECONDS, with_lost_bridges: bool = False) -> list[Member]:
    """The members with a recent heartbeat, by name, and optionally the bridges that retention waits for."""
    at = now(connection)
    wanted = _m.seen_at > at - timedelta(seconds=within)
    if with_lost_bridges:
        wanted = sa.or_(wanted, _m.kind == "bridge")
    rows = connection.execute(sa.select(server_member).where(wanted).order_by(_m.name)).mappings()
    now_us = microseconds_of(at)
    return [_member(row, now_us) for row in rows]


def _member(row: Any, now_us: int) -> Member:
    seen_us = microseconds_of(row["seen_at"])
    return Member(
        row["name"],
        row["kind"],
        row["url"],
        _split(row["roles"]),
        _split(row["shards"]),
        row["room"],
        float(row["load"]),
        json.loads(row["detail"]),
        seen_us,
        max(0.0, (now_us - seen_us) / 1e6),
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def forget_the_long_gone(connection: Connection) -> None:
    """Delete servers, relays and consumers without a heartbeat for a day. Bridges stay: retention waits for them."""
    connection.execute(
        server_member.delete().where(
            _m.seen_at < now(connection) - timedelta(seconds=FORGOTTEN_SECONDS), _m.kind != "bridge"
        )
    )
