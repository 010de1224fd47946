"""A port that another process begins to listen on while a server starts: both may bind it until one of them listens."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from notify.errors import NotifyError
from notify.server import serve
from notify.server.settings import Settings
from notify.server.workers import supervisor
from notify.testing import forked
from notify.testing.ports import free_port
from tests.support.clock import PATIENCE_SECONDS


def start_beside_another(directory: Path, workers: int, told: Connection) -> None:
    """In a process of its own: start a server, on whose port another socket listens once the server has bound it."""
    bind = serve.listen

    def bind_beside_another(settings: Settings) -> socket.socket:
        own, other = bind(settings), socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((settings.host, settings.port))
        other.listen()
        others.append(other)
        return own

    others: list[socket.socket] = []
    for module in (serve, supervisor):
        vars(module)["listen"] = bind_beside_another
    settings = Settings(port=free_port(), data_dir=str(directory), workers=workers)
    try:
        told.send((serve.serve if workers == 1 else supervisor.supervise)(settings))
    except NotifyError as error:
        told.send(f"{settings.port} {error}")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_that_is_taken_while_the_server_starts_is_said_in_a_sentence(tmp_path: Path, workers: int) -> None:
    """One server neither served nor ended; the parent of workers ended with a traceback."""
    hearing, telling = forked.context().Pipe(duplex=False)
    server = forked.context().Process(target=start_beside_another, args=(tmp_path / "data", workers, telling))
    server.start()
    try:
        assert hearing.poll(PATIENCE_SECONDS), "the server neither serves nor ends"
        port, _, said = str(hearing.recv()).partition(" ")
        assert said == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port"
        server.join(PATIENCE_SECONDS)
        assert server.exitcode == 0
    finally:
        server.kill()
        server.join()
