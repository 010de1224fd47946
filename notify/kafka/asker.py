"""A process of its own in which Kafka's brokers are asked for groups, so that the asking one survives what ends it.

librdkafka aborts its process where the connection to a group's coordinator drops while it is asked for the group's
members or positions (https://github.com/confluentinc/librdkafka/issues/4605), and is killed by a fault of its own where
the answer is that the node is not, or not yet, the coordinator (issue 5040): a node that dies, and the first group of a
new cluster, ended the server, the audit or the check-up that asked.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from notify.errors import Unavailable
from notify.kafka.asker_child import Answer, Refusal
from notify.kafka.cluster import Cluster

T = TypeVar("T")
log = logging.getLogger("notify.kafka")

CHILD = "from notify.kafka.asker_child import main; main()"
"""Not as a module with `-m`: its classes would have another name there than here."""
ANSWER_SECONDS = 40.0
"""Longer than all calls of a question may take together. A process that takes longer hangs, and is killed."""
STOP_SECONDS = 5.0
ATTEMPTS = 2
"""A question whose process ends is asked again in another one, so many times in all."""


class Asker:
    """Starts the process when it is needed, and again when it has ended. Close it in the end. One thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None

    def ask(self, question: Callable[[AdminClient], T]) -> T:
        """A question's answer. It is a function of a module that this process and the other one import, or a `partial`
        of one, and may take ANSWER_SECONDS.

        Raises what the question raises of KafkaException and TimeoutError, and Unavailable where the process ended.
        """
        for _ in range(ATTEMPTS):
            try:
                answer: T = _told(self._answer(question))
                return answer
            except (EOFError, ConnectionError):
                ended = self._ended()
                log.warning("the process that asks Kafka for groups ended: %s", ended)
        raise Unavailable(f"the process that asks Kafka for its groups ended ({ended}); try again")

    def close(self) -> None:
        """End the process: it ends when the socket closes."""
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            try:
                self._child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._child = self._connection = None

    def _answer(self, question: Callable[[AdminClient], Any]) -> Answer:
        """Raises EOFError or ConnectionError where the process has ended, TimeoutError where it hangs."""
        connection = self._connection or self._started()
        connection.send(question)
        if not connection.poll(ANSWER_SECONDS):
            log.warning("the process that asks Kafka for groups hangs: it is killed after %g s", ANSWER_SECONDS)
            if self._child is not None:
                self._child.kill()
            self._ended()
            raise TimeoutError
        answer: Answer = connection.recv()
        return answer

    def _started(self) -> Connection[Any, Any]:
        own, childs = socket.socketpair()
        with childs:
            # The same modules as here, wherever this process was started; its output holds only faults.
            path = os.pathsep.join(place or os.getcwd() for place in sys.path)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, str(childs.fileno())],
                pass_fds=[childs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # a terminal's interrupt is for the asking process
            )
        self._connection = Connection(own.detach())
        self._connection.send(self._cluster)
        return self._connection

    def _ended(self) -> str:
        """Let go of a process that has ended; gives how."""
        child = self._child
        self.close()
        code = 0 if child is None else child.returncode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _told(answer: Answer) -> Any:
    if answer is None:
        raise TimeoutError
    if isinstance(answer, Refusal):
        raise KafkaException(KafkaError(answer.code, answer.text, False, answer.retriable))
    return answer.answer
