"""The child process that asks Kafka's brokers on behalf of its parent (admin_process.py)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from notify.kafka.cluster import Cluster


class Told(NamedTuple):
    """The result of a question."""

    answer: Any


class Refusal(NamedTuple):
    """An error of Kafka's client, whose own exceptions do not pass from process to process."""

    code: int
    text: str
    retriable: bool


Answer = Told | Refusal | None
"""None: the brokers did not answer in time."""


def main() -> None:
    """Answer questions until the parent closes its end of the socket, which also happens when the parent dies.

    The socket's number is this process's argument. The cluster is sent over the socket, because its settings may be
    secret.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a parent that is told to stop may still need an answer
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain the cluster's secrets
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        cluster = connection.recv()
        asking = _Asking(cluster)
        while True:
            question = connection.recv()
            # In a thread, so that the parent's end is noticed while brokers do not answer.
            threading.Thread(target=_answer, args=(connection, asking, question), daemon=True).start()
    os._exit(0)  # without waiting for brokers


def _answer(connection: Connection[Any, Any], asking: _Asking, question: Callable[[AdminClient], Any]) -> None:
    try:
        connection.send(asking.answer(question))
    except BaseException:
        # A fault of this process: the parent notices its end.
        sys.excepthook(*sys.exc_info())
        os._exit(1)


class _Asking:
    """Asks one question at a time. The client is replaced after an error, since it may use earlier leaders."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin: AdminClient | None = None

    def answer(self, question: Callable[[AdminClient], Any]) -> Answer:
        if self._admin is None:
            self._admin = self._cluster.admin()
        try:
            return Told(question(self._admin))
        except KafkaException as raised:
            self._admin = None
            error = raised.args[0]
            return Refusal(error.code(), error.str(), error.retriable())
        except TimeoutError:
            return None  # the client is kept, because it still waits for answers
