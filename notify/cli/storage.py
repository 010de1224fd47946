"""`notify storage`: the server's tables in a database, and the registry in it."""

from __future__ import annotations

import time

import typer

from notify.cli.api import AS_JSON
from notify.cli.printed import say, say_json

STORAGE = typer.Option(
    ..., "--storage", envvar="NOTIFY_STORAGE", help="SQLAlchemy URL of the database. [env: NOTIFY_STORAGE]"
)

FOLLOW_SECONDS = 0.2

app = typer.Typer(help="The server's tables in a database.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="storage")


@app.command()
def upgrade(
    storage: str = STORAGE,
    shard: str = typer.Option("main", envvar="NOTIFY_SHARD", help="The name of this database among several."),
    as_json: bool = AS_JSON,
) -> None:
    """Make the tables, or bring them to this version. Safe to repeat, and while servers run."""
    from notify.storage.sql import schema
    from notify.storage.sql.dialects import opened

    with opened(storage) as engine:
        schema.upgrade(engine, shard)
    done = {"version": schema.newest_revision(), "shard": shard}
    say_json(done) if as_json else say(f"shard {shard!r}: tables of version {done['version']}")


@app.command("key-map")
def change_key_map(
    storage: str = STORAGE,
    shards: str | None = typer.Option(None, help="Make a new version: shard names in order, separated by commas."),
    wait: float = typer.Option(60.0, min=0, help="Seconds to follow a change that is under way."),
    as_json: bool = AS_JSON,
) -> None:
    """Show which shards keys map to, or change it while servers run; a change is followed until it is through.

    Keys that move are refused meanwhile (producers try again): some seconds, or while bridges and relays are behind.
    """
    from notify.storage.sql import key_map
    from notify.storage.sql.dialects import opened

    with opened(storage) as engine:
        with engine.begin() as connection:
            if shards is not None:
                key_map.change(connection, [name.strip() for name in shards.split(",") if name.strip()])
            found = key_map.newest(connection)
        said = ""
        until = time.monotonic() + wait
        while found.previous and time.monotonic() < until:
            if found.waits_for != said:
                said = found.waits_for
                say(f"version {found.version} waits for {said}", err=True)
            time.sleep(FOLLOW_SECONDS)
            with engine.connect() as connection:
                found = key_map.newest(connection)
    shown = {"version": found.version, "shards": list(found.shards), "waits_for": found.waits_for}
    if as_json:
        say_json(shown)
    else:
        state = f" (waits for {found.waits_for})" if found.previous else ""
        say(f"version {found.version}: {', '.join(found.shards) or 'the shards by name'}{state}")
    if found.previous and shards is not None:
        raise typer.Exit(1)


@app.command()
def members(storage: str = STORAGE, as_json: bool = AS_JSON) -> None:
    """Who is there: servers, bridges, relays and consumers, by their heartbeats."""
    from notify.storage.sql import registry
    from notify.storage.sql.dialects import opened

    with opened(storage) as engine, engine.begin() as connection:
        found = registry.members(connection, within=registry.FORGOTTEN_SECONDS)
    rows = [
        {"name": m.name, "kind": m.kind, "url": m.url, "roles": m.roles, "shards": m.shards, "room": m.room}
        | {"load": m.load, "age": round(m.age, 1), "detail": m.detail}
        for m in found
    ]
    if as_json:
        say_json({"members": rows})
        return
    for row in rows:
        say(f"{row['age']:>8.1f} s  {row['kind']:<8} {row['name']:<28} {row['url']}  {row['detail'] or ''}")
