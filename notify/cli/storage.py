"""`notify storage`: the server's tables in a database, and the registry in it."""

from __future__ import annotations

import json

import typer

from notify.cli.api import AS_JSON

STORAGE = typer.Option(
    ..., "--storage", envvar="NOTIFY_STORAGE", help="SQLAlchemy URL of the database. [env: NOTIFY_STORAGE]"
)

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
    from storage.sql import schema
    from storage.sql.dialects import open_engine

    engine = open_engine(storage)
    schema.upgrade(engine, shard)
    done = {"version": schema.newest_revision(), "shard": shard}
    typer.echo(json.dumps(done) if as_json else f"shard {shard!r}: tables of version {done['version']}")


@app.command("key-map")
def key_map(
    storage: str = STORAGE,
    shards: str | None = typer.Option(None, help="Make a new version: shard names in order, separated by commas."),
    as_json: bool = AS_JSON,
) -> None:
    """Show which shards keys map to, or change it: servers follow within seconds."""
    from storage.sql import registry
    from storage.sql.dialects import open_engine

    with open_engine(storage).begin() as connection:
        if shards is not None:
            registry.set_key_map(connection, [name.strip() for name in shards.split(",") if name.strip()])
        version, found = registry.key_map(connection)
    shown = {"version": version, "shards": list(found)}
    typer.echo(json.dumps(shown) if as_json else f"version {version}: {', '.join(found) or 'the shards by name'}")


@app.command()
def members(storage: str = STORAGE, as_json: bool = AS_JSON) -> None:
    """Who is there: servers, bridges, relays and consumers, by their heartbeats."""
    from storage.sql import registry
    from storage.sql.dialects import open_engine

    with open_engine(storage).begin() as connection:
        found = registry.members(connection, within=registry.FORGOTTEN_SECONDS)
    rows = [
        {"name": m.name, "kind": m.kind, "url": m.url, "roles": m.roles, "shards": m.shards, "room": m.room}
        | {"load": m.load, "age": round(m.age, 1), "detail": m.detail}
        for m in found
    ]
    if as_json:
        typer.echo(json.dumps({"members": rows}))
        return
    for row in rows:
        typer.echo(f"{row['age']:>8.1f} s  {row['kind']:<8} {row['name']:<28} {row['url']}  {row['detail'] or ''}")
