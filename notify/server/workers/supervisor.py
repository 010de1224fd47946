"""`notify serve --workers N`: one parent process and N servers, each with its own core and its own log.

The parent forks the workers, so that imported modules are in memory once, and listens for them, so that a connection
waits while its worker is started again. It restarts a worker that has died, stops all together, and serves nothing
itself. A worker stops when its parent is gone: it notices that the pipe from the parent was closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from notify.errors import InvalidRequest, NotifyError
from notify.protocol.limits import digits
from notify.protocol.workers import divide
from notify.runtime.clock import wall_clock
from notify.server.cluster.workers import Ended, Workers
from notify.server.configuration.first_token import leave_first_token
from notify.server.configuration.records import Records
from notify.server.data_directory import unusable
from notify.server.database import open_database
from notify.server.serve import address_of, check_settings, listen, make_directory, prepare_log, serve
from notify.server.settings import Settings
from notify.server.workers.heartbeat import beat_seconds, give
from notify.server.workers.parent import STACK, Parent, said_in
from notify.server.workers.worker import Child

log = structlog.get_logger("notify.server")

LOCK = "workers.lock"
LOCK_SECONDS = 30.0
"""How long a start waits for the workers of an earlier parent that was killed, until they have noticed and stopped."""
ORPHAN_SECONDS = 15.0
"""How long a worker whose parent is gone may take to stop cleanly; then it exits."""


def supervise(settings: Settings, greet: Callable[[str, int], None] | None = None) -> int:
    """Serve with `settings.workers` workers until SIGTERM or SIGINT; returns the exit code in the parent and in each
    worker.

    `greet`: as for `serve`, called when all workers are ready. Raises InvalidRequest if a setting does not go with
    workers, and StorageFailed if the directory cannot be used, or a worker cannot start or keeps dying.
    """
    from notify.server import management  # noqa: F401 - so that the workers have it in memory once

    prepare_log()
    _refuse_others(settings)
    check_settings(settings)
    make_directory(settings)
    directory = Path(settings.data_dir)
    try:
        lock = _locked(directory)  # forks hold it too: it is free when the last worker has ended
        divide(directory, settings.workers)
        _make_database(directory, settings)
    except OSError as error:
        raise unusable(directory, error) from error
    sockets = _sockets(settings)
    urls, near = _urls(settings, sockets), _near(settings, sockets)
    parent = Parent(settings, address_of(settings, sockets[0]), sockets, greet)
    if parent.run():
        os.close(lock)
        return 0
    assert parent.child is not None
    return _serve(settings, urls, near, parent.child)


def _refuse_others(settings: Settings) -> None:
    """Raises InvalidRequest if a setting does not go with several logs on one machine."""
    for name, why in {
        "storage": "servers over a database are stateless: start as many as there are cores, each with its --port",
        "kafka": "a server that shows Kafka's groups has no log",
        "registry": "the workers of one machine know each other, and are not members of a registry",
        "ship_to": "each worker has a log of its own; ship a server without workers, or back the workers up",
    }.items():
        if getattr(settings, name):
            raise InvalidRequest(f"--workers {settings.workers} with {name}: {why}")
    if settings.shard != "main":
        raise InvalidRequest("--workers names the shards itself, worker-1 and so on: leave --shard out")


def _locked(directory: Path) -> int:
    """The file descriptor that holds a data directory's lock. Raises InvalidRequest if another process holds it."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise InvalidRequest(
                    f"{directory} is served already: another notify serve, or a worker of one, holds {LOCK}"
                ) from None
            time.sleep(0.05)


def _make_database(directory: Path, settings: Settings) -> None:
    """Make the database that the workers share, and its first token, before the workers would all make it."""
    database = open_database(str(directory))
    try:
        if settings.access:
            leave_first_token(Records(database), directory, wall_clock())
    finally:
        database.dispose()


def _sockets(settings: Settings) -> Sequence[socket.socket]:
    """The sockets to listen on: one, or with TLS one for each worker, on the port and the ports after it.

    Raises InvalidRequest if a port cannot be bound.
    """
    if not settings.tls_certificate:
        return [listen(settings)]
    if settings.port and settings.port + settings.workers - 1 > 65535:
        raise InvalidRequest(f"--port {settings.port}: {settings.workers} workers need that many ports from it on")
    ports = [settings.port + number if settings.port else 0 for number in range(settings.workers)]
    bound: list[socket.socket] = []
    try:
        for port in ports:
            bound.append(listen(dataclasses.replace(settings, port=port)))
    except InvalidRequest:
        for each_socket in bound:
            each_socket.close()
        raise
    return bound


def _urls(settings: Settings, sockets: Sequence[socket.socket]) -> tuple[str, ...]:
    """The address of each worker for clients. The setting `url` is the first worker's; the others follow from it."""
    bound_urls = [address_of(settings, bound) for bound in sockets]
    if len(bound_urls) == 1:
        base = settings.url.rstrip("/") or bound_urls[0]
        return tuple(f"{base}/{name}" for name in settings.key_shards)
    if not settings.url:
        return tuple(f"{url}/{name}" for url, name in zip(bound_urls, settings.key_shards, strict=True))
    base, _, text = settings.url.rstrip("/").rpartition(":")
    port = digits(text, 5)
    if port is None:
        raise InvalidRequest(
            f"setting url is {settings.url}: with workers and TLS it needs a port, and clients reach worker n on the "
            "n-th port from it on"
        )
    return tuple(f"{base}:{port + number}/{name}" for number, name in enumerate(settings.key_shards))


def _near(settings: Settings, sockets: Sequence[socket.socket]) -> tuple[str, ...]:
    """The addresses at which workers reach each other. Each names one worker, so that only this one answers."""
    scheme = "https" if settings.tls_certificate else "http"
    urls = []
    for number, name in enumerate(settings.key_shards):
        host, port = sockets[number % len(sockets)].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # the wildcard address is reached on loopback
        urls.append(f"{scheme}://[{host}]:{port}/{name}" if ":" in host else f"{scheme}://{host}:{port}/{name}")
    return tuple(urls)


# --- in a worker ----------------------------------------------------------------------------------------------


def _serve(settings: Settings, urls: Sequence[str], near: Sequence[str], child: Child) -> int:
    """Serve as the forked worker; returns the exit code. `urls`, `near`: addresses for clients, and for workers."""
    worker, tell = child.worker, child.tell
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which stops its workers
    os.set_blocking(tell, False)  # a suspended parent that does not read must not block this loop
    if sys.stderr is not None:
        faulthandler.register(STACK, sys.stderr)  # works without the interpreter, which may hang
    name = settings.key_shards[worker.number]
    directory = Path(settings.data_dir)
    worker_settings = dataclasses.replace(settings, data_dir=str(directory / name), shard=name, url=urls[worker.number])
    workers = Workers(worker.number, urls, near, directory, Ended(worker.ends, worker.last_end))
    threading.Thread(target=_follow_parent, args=(child.hear, workers), name="notify-parent", daemon=True).start()

    def greet(_: str, topics: int) -> None:
        _say(tell, topics=topics)
        give(partial(_say, tell, lives=True), beat_seconds(settings.worker_timeout_seconds))

    try:
        return serve(worker_settings, greet, worker.bound, child.channel, workers)
    except NotifyError as error:
        _say(tell, failed=str(error))
        return 2
    except BaseException as error:
        _say(tell, failed=f"{type(error).__name__}: {error}")
        raise


def _say(tell: int, **report: Any) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, which `_follow_parent` notices, or is suspended
        os.write(tell, json.dumps(report).encode() + b"\n")


def _follow_parent(hear: int, workers: Workers) -> None:
    """Note which workers do not serve, and stop this process when its parent is gone."""
    rest = b""
    while data := os.read(hear, 4096):
        reports, rest = said_in(rest + data)
        for report in reports:
            workers.away, workers.silent = tuple(report["away"]), frozenset(report["silent"])
    log.error("parent_is_gone", remedy="this worker stops: start notify serve again")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
