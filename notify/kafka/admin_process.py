"""Asks Kafka's brokers about groups in a child process, so that this process survives crashes of Kafka's client.

librdkafka aborts its process if the connection to a group's coordinator drops while it is asked for the group's members
or positions (https://github.com/confluentinc/librdkafka/issues/4605). It crashes if the answer is that the node is not,
or not yet, the coordinator (issue 5040). So a node that died, or the first group of a new cluster, would end the
server, the audit or the check-up that asked.
"""

from __future__ import annotations

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
from notify.kafka.admin_process_child import Answer, Refusal
from notify.kafka.cluster import Cluster
from notify.runtime.program_log import program_log

T = TypeVar("T")
log = program_log("notify.kafka")

CHILD = "from notify.kafka.admin_process_child import main; main()"
"""Not as a module with `-m`, which would give its classes other names than they have here."""
ANSWER_SECONDS = 40.0
"""Longer than all calls of a question together may take. A process that takes longer hangs, and is killed."""
STOP_SECONDS = 5.0
ATTEMPTS = 2
"""How often a question is asked in all, each time in a new process if the last one ended."""


class AdminProcess:
    """Starts the child process when needed, and again if it has ended. Must be closed. For one thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None

    def ask(self, question: Callable[[AdminClient], T]) -> T:
        """The answer to a question: a function of a module that both processes import, or a `partial` of one.

        It may take ANSWER_SECONDS. Raises the question's KafkaException or TimeoutError; Unavailable if the process
        ended.
        """
        for _ in range(ATTEMPTS):
            try:
                answer: T = _result(self._answer(question))
                return answer
            except (EOFError, ConnectionError):
                ended = self._ended()
                log.warning("the process that asks Kafka for groups ended: %s", ended)
        raise Unavailable(f"the process that asks Kafka for its groups ended ({ended}); try again")

    def close(self) -> None:
        """End the process, by closing the socket."""
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
        """Ask the process. Raises EOFError or ConnectionError if it has ended, TimeoutError if it hangs."""
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
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            # The child imports the same modules as this process; it prints only faults.
            path = os.pathsep.join(place or os.getcwd() for place in sys.path)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, str(child_socket.fileno())],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # so that a terminal's interrupt reaches only this process
            )
        self._connection = Connection(parent_socket.detach())
        self._connection.send(self._cluster)
        return self._connection

    def _ended(self) -> str:
        """Clean up after a process that has ended; how it ended."""
        child = self._child
        self.close()
        code = 0 if child is None else child.returncode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _result(answer: Answer) -> Any:
    if answer is None:
        raise TimeoutError
    if isinstance(answer, Refusal):
        raise KafkaException(KafkaError(answer.code, answer.text, False, answer.retriable))
    return answer.answer
