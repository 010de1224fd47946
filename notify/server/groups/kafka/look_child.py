"""The process that asks Kafka's brokers for a snapshot of all groups, in place of the server (look_process.py)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from notify.kafka.cluster import Cluster
from notify.server.groups.kafka import snapshot
from notify.server.groups.kafka.snapshot import Snapshot


class Refusal(NamedTuple):
    """An error of Kafka's client, whose own exceptions do not pass from process to process."""

    code: int
    text: str
    retriable: bool


Answer = Snapshot | Refusal | None
"""None: the brokers did not answer in time."""


def main() -> None:
    """Answer questions (`in_part`: bool) until the server closes its end of the socket, as it also does when it dies.

    The socket's number is this process's argument; the cluster comes over the socket, as its settings may be secret.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a server that is told to stop still answers, and closes the socket
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the cluster's secrets
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the server is gone
        cluster = connection.recv()
        asking = _Asking(cluster)
        while True:
            question = connection.recv()
            # In a thread, so that the end of the server is noticed while brokers do not answer.
            threading.Thread(target=_answer, args=(connection, asking, question), daemon=True).start()
    os._exit(0)  # without waiting for brokers


def _answer(connection: Connection[Any, Any], asking: _Asking, in_part: bool) -> None:
    try:
        connection.send(asking.answer(in_part))
    except BaseException:
        # A fault of this process: its end is what the server notices.
        sys.excepthook(*sys.exc_info())
        os._exit(1)


class _Asking:
    """One question at a time, by a client that is renewed after a refusal: it goes on believing in earlier leaders."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin: AdminClient | None = None

    def answer(self, in_part: bool) -> Answer:
        if self._admin is None:
            self._admin = self._cluster.admin()
        try:
            return snapshot.take(self._admin, in_part=in_part)
        except KafkaException as raised:
            self._admin = None
            error = raised.args[0]
            return Refusal(error.code(), error.str(), error.retriable())
        except TimeoutError:
            return None  # the client is kept: it has answers under way
