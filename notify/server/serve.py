"""Runs the server: uvicorn with uvloop, and Notify's own HTTP connections."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import os
import socket
import stat
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import structlog
import uvicorn

from notify.errors import InvalidRequest, StorageFailed, Unavailable
from notify.protocol.workers import check_count, refuse_one_of_several
from notify.runtime import tracing
from notify.runtime.addresses import is_loopback
from notify.runtime.alive import beat, tell
from notify.runtime.clock import steady_clock
from notify.runtime.log_output import STDERR_FILE, STDOUT
from notify.runtime.signals import StopRequests, end_by
from notify.runtime.urls import server_address
from notify.runtime.visible import visible
from notify.server import webhooks
from notify.server.app import App
from notify.server.cluster.workers import Workers
from notify.server.configuration import first_token
from notify.server.connections.handed import Handed
from notify.server.connections.handshake import Handshake
from notify.server.connections.protocol import Protocol
from notify.server.connections.quota import allowed_by_files
from notify.server.connections.tls import Certificates
from notify.server.data_directory import keep_shard
from notify.server.settings import Settings, check_trace_url
from notify.server.start import cluster_of, roles_of
from notify.storage.log import LogStore
from notify.storage.transactions import TransactionStore

log = structlog.get_logger("notify.server")
QUOTED = frozenset(" \t=\r\n\"'")
"""structlog writes a text with one of these characters as Python's `repr` does, with escapes."""

STOP_SECONDS = 50.0
"""How long a server may take to stop. Its parts stop within some seconds each, unless a library hangs."""
SWITCH_SECONDS = 0.0001
"""How long the event loop may keep the interpreter while the log's writer waits for it after a sync. With Python's
default of 5 ms the writer waits up to 5 ms after each sync: 36,000 transactions/s instead of 45,000."""


def check_host(settings: Settings) -> None:
    """Raises InvalidRequest if other machines could reach the address without a token, or with one in the clear."""
    host = settings.host
    if is_loopback(host):
        return
    if not settings.access:
        raise InvalidRequest(
            f"--host {host}: while access is off, only loopback is served (127.0.0.1, ::1 or localhost); switch it on "
            "with --access"
        )
    if not settings.tls_certificate and not settings.plaintext:
        raise InvalidRequest(
            f"--host {host}: tokens would cross the network in the clear. Give --tls-certificate and --tls-key, "
            "or set NOTIFY_PLAINTEXT=1 where a proxy ends TLS"
        )


def _certificates(settings: Settings) -> Certificates | None:
    """The certificates; None if TLS is off. Raises InvalidRequest if a file is not a certificate, key or authority."""
    if not settings.tls_certificate:
        if settings.tls_key or settings.tls_client_ca:
            raise InvalidRequest("tls_key and tls_client_ca need tls_certificate")
        return None
    return Certificates(settings)


def _visibly(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor for structlog. It escapes control characters in names and reasons: a terminal would obey them."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable() and QUOTED.isdisjoint(value):
            event[name] = visible(value)
    return event


def prepare_log() -> None:
    """Have this process escape what it logs for a terminal, and continue if nothing reads its output any more."""
    if not structlog.is_configured():
        *steps, renderer = structlog.get_config()["processors"]
        structlog.configure(
            processors=[*steps, _visibly, renderer],
            logger_factory=lambda *_: structlog.PrintLogger(cast(TextIO, STDOUT)),
        )


class Server(uvicorn.Server):
    """A server that a second SIGTERM or Ctrl-C ends immediately. Its log is then as after a crash.

    So is that of a server that has not stopped after STOP_SECONDS: it prints where its threads are, and exits with 1.
    A worker among several (`is_alone` false) leaves both to its parent, which repeats the signal and kills it if that
    does not help.
    """

    def __init__(self, config: uvicorn.Config, is_alone: bool) -> None:
        super().__init__(config)
        self._is_alone = is_alone
        self._wishes = StopRequests()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_alone:
            if self._wishes.count() > 1:
                end_by(sig)
            tell("STOPPING=1")
            faulthandler.dump_traceback_later(STOP_SECONDS, exit=True, file=STDERR_FILE)
        if not self.should_exit:  # at a Ctrl-C that arrives twice uvicorn would not wait for the shutdown
            super().handle_exit(sig, frame)


def serve(
    settings: Settings,
    greet: Callable[[str, int], None] | None = None,
    bound: socket.socket | None = None,
    channel: socket.socket | None = None,
    workers: Workers | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    `greet` is called when the server is ready, with its address and the number of its topics. One of several `workers`
    gets either `bound`, the socket that it listens on, or `channel`, over which its parent hands it connections. Raises
    InvalidRequest if a setting is invalid, StorageFailed if the storage cannot be opened.
    """
    prepare_log()
    certificates = check_settings(settings)
    failed: list[StorageFailed] = []
    following: list[asyncio.Task[None]] = []

    def stop_at_once(error: StorageFailed) -> None:
        # No request that waits may be acknowledged any more, so that the process ends here.
        failed.append(error)
        os._exit(1)

    def started() -> None:
        _settle_garbage()
        if certificates is not None:
            following.append(asyncio.get_running_loop().create_task(certificates.follow()))
        if channel is not None:
            uvicorn_arguments: Any = (config, server.server_state, server.lifespan.state)
            Handed(channel, functools.partial(config.http_protocol_class, *uvicorn_arguments)).start()
        if channel is None:
            # uvicorn would listen only after this. A client that reads the greeting may connect now, and waits until
            # uvicorn accepts. If another process listens there by now, uvicorn would neither serve nor end.
            try:
                listening.listen(config.backlog)
            except OSError as error:
                raise cannot_listen(settings, error) from None
        topics = len(app.running().core.store.topics())
        event = "ready" if workers is None else "worker_is_ready"  # the parent says when all of them are
        log.info(event, url=address, data_dir=settings.data_dir, shard=settings.shard, topics=topics)
        following.append(asyncio.get_running_loop().create_task(_load(app, stop_serving)))
        if workers is None:  # the parent of the workers reports to what supervises this process
            following.append(asyncio.get_running_loop().create_task(beat()))
        if greet is not None:
            greet(address, topics)

    def stop_serving() -> None:
        sockets.clear()  # uvicorn listens afterwards on the sockets of this list
        server.should_exit = True

    store = _store(settings, stop_at_once)
    _prepare(settings)
    app = App(settings, lambda: store, steady_clock, started, stop_serving, workers)
    app.connections.most = allowed_by_files(settings.connections)
    config = _config(app, settings, certificates)
    with channel or bound or listen(settings) as listening:
        address = settings.url if channel is not None else address_of(settings, listening)
        app.url = app.url or address
        log.info("starting", url=address, data_dir=settings.data_dir, shard=settings.shard)
        server = Server(config, is_alone=workers is None)
        sockets = [listening] if channel is None else []
        server.run(sockets=sockets)
        if app.failed is not None:
            raise app.failed
        return 0 if server.started and not failed else 1


def check_settings(settings: Settings) -> Certificates | None:
    """The certificates; None if TLS is off. Raises InvalidRequest if a setting is invalid, alone or together with
    another."""
    check_host(settings)
    certificates = _certificates(settings)
    roles_of(settings)
    if settings.url:
        try:
            server_address(settings.url)
        except InvalidRequest as error:
            raise InvalidRequest(f"setting url: {error}") from None
    if settings.registry:
        from notify.storage.sql.engines import open_engine

        open_engine(settings.registry, named="--registry").dispose()
    if settings.kafka:
        cluster_of(settings)
    if settings.alarm_webhook:
        webhooks.check_address(settings.alarm_webhook, settings)
    check_trace_url(settings)
    if settings.storage and not settings.create_topics:
        raise InvalidRequest(
            "create_topics = false needs to know the topics, and with a database as storage those are the queue "
            "servers': set it there"
        )
    return certificates


def _prepare(settings: Settings) -> None:
    """Prepare this process and its data directory. Raises InvalidRequest if that is not possible."""
    if settings.tracing:
        try:
            tracing.export_from_environment()
        except ImportError as error:
            raise InvalidRequest(f"tracing needs the extra otel: pip install 'notify-tx[otel]' ({error})") from None
    make_directory(settings)
    sys.setswitchinterval(SWITCH_SECONDS)


def make_directory(settings: Settings) -> None:
    """Make the data directory, for its owner only. Raises InvalidRequest if it cannot be made, is divided among
    another number of workers, or has another shard's log."""
    directory = Path(settings.data_dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot make the data directory {settings.data_dir}: {error.strerror}") from None
    _keep_to_owner(directory)
    if settings.shard not in settings.key_shards:  # of a worker's directory its parent has checked this
        check_count(directory, settings.workers)
        refuse_one_of_several(directory)
        if settings.workers > 1:
            return  # the logs are in the directories of the workers
    if not settings.storage and not settings.kafka:
        keep_shard(directory, settings.shard)


def _store(settings: Settings, on_failure: Callable[[StorageFailed], None]) -> TransactionStore:
    """The storage that the settings name, not opened yet. `on_failure` is called if a log cannot be written any more.

    Raises InvalidRequest if a database's URL is invalid.
    """
    retention_us = round(settings.retention_seconds * 1_000_000)
    if settings.storage:
        from notify.storage.sql.shards import open_storage

        return open_storage(settings.storage, settings.shard, retention_us=retention_us, writers=settings.sql_writers)
    if settings.kafka:
        from notify.storage.memory import MemoryStore

        return MemoryStore()  # it stays empty: this server only shows Kafka's groups
    return LogStore(
        Path(settings.data_dir) / "log",
        segment_bytes=settings.segment_bytes,
        on_failure=on_failure,
        retention_us=retention_us,
        retention_bytes=settings.retention_bytes,
    )


def _config(app: App, settings: Settings, certificates: Certificates | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        # The connection itself begins TLS, so that a handshake counts among the connections.
        http=Protocol if certificates is None else functools.partial(Handshake, certificates.context),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        interface="asgi3",
        proxy_headers=False,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )


def _keep_to_owner(directory: Path) -> None:
    """Let only the directory's owner read messages and tokens, also in a directory that existed before."""
    with contextlib.suppress(OSError):
        (directory / first_token.FILE).chmod(0o600)
    status = directory.stat()
    others = stat.S_IMODE(status.st_mode) & 0o077
    if not others:
        return
    if status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:  # a sticky one is shared on purpose
        with contextlib.suppress(OSError):
            directory.chmod(0o700)
            log.warning("data_directory_closed", directory=str(directory), was=f"{stat.S_IMODE(status.st_mode):04o}")
            return
    log.warning("data_directory_is_open", directory=str(directory), remedy=f"chmod 700 {directory}")


async def _load(app: App, stop_serving: Callable[[], None]) -> None:
    """Load what operators need, so that the first of them does not wait for it; without its modules, end the server."""
    try:
        await app.management()
    except Unavailable as error:
        if isinstance(error.__cause__, ImportError):
            reason = f"this installation of Notify is incomplete: {error.__cause__}; install it again"
            app.failed = InvalidRequest(reason)
            stop_serving()
    else:
        gc.freeze()  # without a collection, which would stop the loop of a server that serves


def _settle_garbage() -> None:
    """Exempt the objects of this moment from garbage collection.

    A full collection would walk every imported module's objects, and stop the loop for 80 ms and more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def address_of(settings: Settings, bound: socket.socket) -> str:
    """The address of a socket that this server listens on."""
    host, port = bound.getsockname()[:2]
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def listen(settings: Settings) -> socket.socket:
    """A socket that is bound to the host and port of the settings. Raises InvalidRequest if they cannot be bound."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise cannot_listen(settings, error) from None
    return listening


def cannot_listen(settings: Settings, error: OSError) -> InvalidRequest:
    """The error for an address that cannot be bound, or on which another process has begun to listen meanwhile."""
    place = f"{settings.host}:{settings.port}"
    return InvalidRequest(f"cannot listen on {place}: {error.strerror}; choose another --host or --port")
