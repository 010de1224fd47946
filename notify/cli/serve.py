"""`notify serve`: runs a server."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from notify import __version__
from notify.cli.printed import is_terminal, say
from notify.runtime.signals import stop_at_hangup
from notify.server import settings as settings_module
from notify.server.settings import Settings

TLS_CERTIFICATE = typer.Option(None, help="PEM file of the certificate for TLS. [env: NOTIFY_TLS_CERTIFICATE]")
TLS_KEY = typer.Option(None, help="PEM file of its key. [env: NOTIFY_TLS_KEY]")
TLS_CLIENT_CA = typer.Option(None, help="PEM file of authorities for client certificates. [env: NOTIFY_TLS_CLIENT_CA]")
WORKERS = typer.Option(
    None, help="Processes that serve, each on a core and with a log of its own. [env: NOTIFY_WORKERS]"
)
CONFIG = typer.Option(None, help="TOML file of settings. [env: NOTIFY_CONFIG]", envvar="NOTIFY_CONFIG")


def _with_defaults(command: Callable[..., None]) -> Callable[..., None]:
    """Let --help show the settings' defaults: the flags have none, because a variable or a file may set them."""
    for name, parameter in inspect.signature(command).parameters.items():
        if name in Settings.__dataclass_fields__:
            default = Settings.__dataclass_fields__[name].default
            if isinstance(default, bool):
                parameter.default.show_default = name if default else f"no-{name}"
            elif default not in ("", None):
                parameter.default.show_default = f"{default:g}" if isinstance(default, float) else str(default)
    return command


@_with_defaults
def serve(
    host: str | None = typer.Option(
        None, help="Address to listen on; one that is not loopback needs --access. [env: NOTIFY_HOST]"
    ),
    port: int | None = typer.Option(None, help="Port; 0 takes a free one. [env: NOTIFY_PORT]"),
    data_dir: str | None = typer.Option(None, help="Directory of the log. [env: NOTIFY_DATA_DIR]"),
    storage: str | None = typer.Option(
        None, help="A database (SQLAlchemy URL) for transactions instead of the log. [env: NOTIFY_STORAGE]"
    ),
    kafka: str | None = typer.Option(
        None, help="A Kafka cluster (kafka://host:port,…) whose groups to show and manage. [env: NOTIFY_KAFKA]"
    ),
    roles: str | None = typer.Option(None, help="Roles to announce: transactions,queue. [env: NOTIFY_ROLES]"),
    registry: str | None = typer.Option(
        None, help="The database of the registry; default: that of --storage. [env: NOTIFY_REGISTRY]"
    ),
    room: str | None = typer.Option(None, help="Label of this server's place. [env: NOTIFY_ROOM]"),
    shard: str | None = typer.Option(None, help="Name of this log among several. [env: NOTIFY_SHARD]"),
    workers: int | None = WORKERS,
    ship_to: str | None = typer.Option(
        None, help="Object store to ship the log to: s3://bucket/prefix, file:///directory. [env: NOTIFY_SHIP_TO]"
    ),
    ship_every: float | None = typer.Option(
        None, help="Seconds of the log that may be lost with the disk. [env: NOTIFY_SHIP_EVERY]"
    ),
    ship_rate: float | None = typer.Option(None, help="Ship at most this many MiB per second. [env: NOTIFY_SHIP_RATE]"),
    ship_keep: float | None = typer.Option(
        None, help="How long the store keeps dropped segments, in seconds; 0: forever. [env: NOTIFY_SHIP_KEEP]"
    ),
    access: bool | None = typer.Option(
        None, "--access/--no-access", help="Require a token or certificate. [env: NOTIFY_ACCESS]"
    ),
    tls_certificate: str | None = TLS_CERTIFICATE,
    tls_key: str | None = TLS_KEY,
    tls_client_ca: str | None = TLS_CLIENT_CA,
    config: Path | None = CONFIG,
) -> None:
    """Run a server: transactions and queues in one log on the local disk, or transactions in a database."""
    flags: dict[str, Any] = {"host": host, "port": port, "data_dir": data_dir, "shard": shard, "workers": workers}
    flags |= {"access": access, "tls_certificate": tls_certificate, "tls_key": tls_key}
    flags |= {"tls_client_ca": tls_client_ca}
    flags |= {"ship_to": ship_to, "ship_every": ship_every, "ship_rate": ship_rate}
    flags |= {"ship_keep": ship_keep}
    flags |= {"storage": storage, "kafka": kafka, "roles": roles, "registry": registry, "room": room}
    settings = settings_module.load(flags, config)
    for variable, meant in settings_module.mistyped(os.environ).items():
        say(f"notify: {variable} sets nothing; the setting is {meant}", err=True)

    def greet(address: str, topics: int) -> None:
        say(greeting(settings, address, topics))

    when_ready = greet if is_terminal() else None
    stop_at_hangup()
    if settings.workers > 1:
        from notify.server.workers.supervisor import supervise

        raise typer.Exit(supervise(settings, when_ready))
    from notify.server.serve import serve

    raise typer.Exit(serve(settings, when_ready))


def greeting(settings: Settings, address: str, topics: int) -> str:
    """The lines for a user who starts a server in a terminal, once it is ready; a log gets the line `ready`."""
    from notify.server.configuration import first_token

    directory = Path(settings.data_dir).resolve()
    token = directory / first_token.FILE
    if settings.storage:
        storage = f"transactions in a database, as shard {settings.shard}; a bridge or relay moves the messages"
    elif settings.kafka:
        storage = "nothing here: this server shows and steers the groups of Kafka"
    elif settings.workers > 1:
        storage = f"{settings.workers} workers, each with a log in {directory}, {topics} topics"
    else:
        storage = f"the log in {directory}, {topics} topics"
    access = f"on; {token} has a token that may make others" if token.exists() else "on"
    if not settings.access:
        access = "off: every process on this machine may do everything"
    lines = {"console": f"{address}/", "storage": storage, "access": access}
    if not settings.storage and not settings.kafka:
        lines |= {"try it": "notify message send greetings hello", "": "notify topic tail greetings"}
    lines |= {"stop": "Ctrl-C; nothing acknowledged is lost"}
    texts = [f"  {name:<9} {text}" for name, text in lines.items()]
    return "\n".join([f"Notify {__version__} is ready at {address}", *texts])
