"""Running the server: uvicorn with uvloop and httptools, guarded against clients that never finish."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from notify.errors import InvalidRequest, StorageFailed
from notify.server.app import App
from notify.settings import Settings
from storage.log import LogStore

log = structlog.get_logger("notify.server")

HEADER_BYTES = 64 << 10
HEADER_SECONDS = 10.0

SWITCH_SECONDS = 0.0001
"""How long the event loop may keep the interpreter while the log's writer waits for it, back from a sync. With
Python's 5 ms each sync is followed by up to 5 ms of waiting: 36,000 transactions/s instead of 45,000."""


class GuardedProtocol(HttpToolsProtocol):
    """A connection must send its request's head in time and within bounds, or it is cut.

    The stock protocol waits for ever for a head and takes one of any size.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None or self._head_bytes:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEADER_BYTES and not self._head_is_done():
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 1
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def _head_is_done(self) -> bool:
        return self._head_timer is None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().connection_lost(exc)


def check_host(host: str) -> None:
    """Raises InvalidRequest for an address that others could reach: access control is not there yet."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host == "localhost":
        return
    raise InvalidRequest(
        f"--host {host}: while access control is off, only loopback is served (127.0.0.1, ::1 or localhost)"
    )


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises InvalidRequest for settings that cannot be."""
    check_host(settings.host)
    failed: list[StorageFailed] = []

    def open_store() -> LogStore:
        return LogStore(
            Path(settings.data_dir) / "log",
            segment_bytes=settings.segment_bytes,
            on_failure=stop_at_once,
            retention_us=round(settings.retention_seconds * 1_000_000),
        )

    def stop_at_once(error: StorageFailed) -> None:
        # Nothing that waits may be acknowledged, and nothing of this process's memory is worth keeping.
        failed.append(error)
        os._exit(1)

    sys.setswitchinterval(SWITCH_SECONDS)
    app = App(settings, open_store)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )
    with _listen(settings) as listening:
        host, port = listening.getsockname()[:2]
        log.info("listening", url=f"http://{host}:{port}", data_dir=settings.data_dir, shard=settings.shard)
        server = uvicorn.Server(config)
        server.run(sockets=[listening])
        return 0 if server.started and not failed else 1


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise InvalidRequest(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
    return listening
