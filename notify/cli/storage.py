"""`notify storage`: a server's tables in a database, the key map and the nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from notify.cli.api import AS_JSON, Columns, fields, seconds, show_rows
from notify.cli.printed import say, say_json
from notify.errors import InvalidRequest
from notify.protocol.limits import check_name
from notify.protocol.wire import instant

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

STORAGE = typer.Option(
    ..., "--storage", envvar="NOTIFY_STORAGE", help="The database's SQLAlchemy URL. [env: NOTIFY_STORAGE]"
)

FOLLOW_SECONDS = 0.2
READ_THROUGH = "read_through_us"
"""The figure of a bridge with the time up to which it has read, in microseconds since 1970."""
MEMBERS: Columns = {
    **fields("name", "kind"),
    "url": lambda m: m["url"] or "-",
    "roles": lambda m: m["roles"] or "-",
    "shards": lambda m: m["shards"] or "-",
    "last seen": lambda m: f"{m['age']:.1f} s ago",
    "detail": lambda m: _detail(m),
}

group = typer.Typer(no_args_is_help=True)


@contextmanager
def _verified(storage: str) -> Iterator[Engine]:
    """An engine for a server's tables. Raises UnsafeTable if this role may not see all of them."""
    from notify.storage.sql import schema
    from notify.storage.sql.engines import opened

    with opened(storage) as engine:
        schema.verify(engine)
        yield engine


@group.command()
def upgrade(
    storage: str = STORAGE,
    shard: str = typer.Option("main", envvar="NOTIFY_SHARD", help="The name of this database among several."),
    as_json: bool = AS_JSON,
) -> None:
    """Create the tables, or upgrade them to this version. May be repeated, and run while servers run."""
    from notify.storage.sql import schema
    from notify.storage.sql.engines import opened

    check_name("shard", shard)
    with opened(storage) as engine:
        schema.upgrade(engine, shard)
    done = {"version": schema.newest_revision(), "shard": shard}
    say_json(done) if as_json else say(f"shard {shard!r}: tables of version {done['version']}")


@group.command("key-map")
def change_key_map(
    storage: str = STORAGE,
    shards: str | None = typer.Option(
        None, help="Change the map to these shards: their names in order, separated by commas."
    ),
    take_back: bool = typer.Option(
        False, "--take-back", help="Undo a change that is still under way: the previous map becomes valid again."
    ),
    wait: float = typer.Option(60.0, min=0, help="How long to follow a change, in seconds."),
    as_json: bool = AS_JSON,
) -> None:
    """Show the map of keys to shards, or change it while servers run and follow the change to its end.

    Meanwhile, keys that move are refused (producers retry): for some seconds, or while bridges or relays are behind.
    """
    from notify.storage.sql import key_map

    if take_back and shards is not None:
        raise InvalidRequest("give --shards or --take-back, not both")
    with _verified(storage) as engine:
        with engine.begin() as connection:
            if take_back:
                key_map.take_back(connection)
            elif shards is not None:
                key_map.change(connection, [name.strip() for name in shards.split(",") if name.strip()])
            current = key_map.newest(connection)
        last_reason = ""
        until = time.monotonic() + wait
        while current.previous and time.monotonic() < until:
            if current.waits_for != last_reason:
                last_reason = current.waits_for
                say(f"version {current.version} waits for {last_reason}", err=True)
            time.sleep(FOLLOW_SECONDS)
            with engine.connect() as connection:
                current = key_map.newest(connection)
    answer = {"version": current.version, "shards": list(current.shards), "waits_for": current.waits_for}
    if as_json:
        say_json(answer)
    else:
        state = f" (waits for {current.waits_for})" if current.previous else ""
        say(f"version {current.version}: {', '.join(current.shards) or 'the shards by name'}{state}")
    if current.previous and shards is not None:
        raise typer.Exit(1)


@group.command()
def nodes(storage: str = STORAGE, as_json: bool = AS_JSON) -> None:
    """List servers, bridges, relays and consumers by their heartbeats."""
    from notify.storage.sql import registry

    with _verified(storage) as engine, engine.begin() as connection:
        present = registry.members(connection, within=registry.FORGOTTEN_SECONDS, with_lost_bridges=True)
    rows = [
        {"name": m.name, "kind": m.kind, "url": m.url, "roles": list(m.roles), "shards": list(m.shards), "room": m.room}
        | {"load": m.load, "age": round(m.age, 1), "detail": m.detail}
        for m in present
    ]
    show_rows({"members": rows}, as_json, "members", MEMBERS)


@group.command()
def forget(
    name: str = typer.Argument(..., help="The member's name, as `notify storage nodes` shows it."),
    storage: str = STORAGE,
    as_json: bool = AS_JSON,
) -> None:
    """Remove a bridge, relay or server that will not come back: retention and the key map no longer wait for it."""
    from notify.storage.sql import registry

    with _verified(storage) as engine, engine.begin() as connection:
        registry.forget(connection, name)
    say_json({"forgotten": name}) if as_json else say(f"{name} is forgotten")


def _detail(member: dict[str, Any]) -> str:
    """A member's own figures in words."""
    facts = {name: value for name, value in member["detail"].items() if name != READ_THROUGH}
    words = [f"{name.replace('_', ' ')} {value}" for name, value in facts.items()]
    if member["detail"].get(READ_THROUGH):
        words.append(f"read through {seconds(instant(member['detail'][READ_THROUGH]))}")
    return ", ".join(words) or "-"
