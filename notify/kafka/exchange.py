"""Whether brokers have answered all that a client sent to them in a transaction, by the log that the client writes.

A request without an answer may still be on its way, in the buffers of a broken connection, although the client has sent
it again and succeeded. It then arrives in a later transaction. Kafka's client shows its requests nowhere but in its log
(docs/adr/0051-a-producer-is-spent-if-a-request-has-no-answer.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from notify.runtime.program_log import program_log

log = program_log("notify.kafka")

_LINE = re.compile(r"(.*): (?:Sent|Sent partial|Received) (\w+?)(?:Request|Response) \(.*\bCorrId (\d+)")
_SENT, _RECEIVED = "SEND", "RECV"
_CHANGE_NOTHING = frozenset((
    "ApiVersion", "Metadata", "FindCoordinator", "SaslHandshake", "SaslAuthenticate", "GetTelemetrySubscriptions",
    "PushTelemetry",
))  # fmt: skip
"""Requests that may arrive late. All others count, also unknown ones."""
_END = "EndTxn"
_LEVELS = {str(n): level for n, level in enumerate([50, 50, 50, 40, 30, 20, 20, 10])}
"""The levels of Python's log for the client's `log_level`, from 0 to 7."""


class Exchange:
    """The requests of one client within a transaction. It is the client's logger: the client tells of a request and of
    its answer before the call that waited for it returns, or in the next `poll`."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """`settings`: those of the operators, whose `debug` and `log_level` say which lines are logged."""
        self._asked = settings.get("debug", "")
        self._least = logging.DEBUG if self._asked else _LEVELS.get(settings.get("log_level", ""), logging.CRITICAL)
        self._waiting: set[tuple[str, str]] = set()
        """Connection and number of the requests that were sent and have no answer."""
        self._sent = self._ends = 0
        """How many requests the transaction has, and how many to end it."""
        self.tells = False
        """Whether the client has told of any request; another version of the client might not."""

    @property
    def settings(self) -> dict[str, Any]:
        """The client's settings that make it tell."""
        return {"debug": f"protocol,{self._asked}".rstrip(","), "log_level": 7, "logger": self}

    def log(self, level: int, form: str, *given: Any) -> None:
        """Take a line of the client's log: its level in Python, and the line's kind, client and text."""
        kind, line = given[0], given[-1]
        if kind in (_SENT, _RECEIVED):
            self._note(kind, line)
            if "protocol" not in self._asked and "all" not in self._asked:
                return
        if level >= self._least:
            # Commands show INFO and above, and a user who sets `debug` wants to see its lines.
            log.log(max(level, logging.INFO) if self._asked else level, form, *given)

    def _note(self, kind: str, line: str) -> None:
        told = _LINE.match(line)
        if told is None:
            return
        self.tells = True
        connection, request, number = told.groups()
        if request in _CHANGE_NOTHING:
            return
        if kind == _RECEIVED:
            self._waiting.discard((connection, number))
        elif (connection, number) not in self._waiting:  # the last part of a request follows its first one
            self._waiting.add((connection, number))
            self._sent += 1
            self._ends += request == _END

    def begin(self) -> None:
        """Forget what was before a transaction."""
        self._waiting.clear()
        self._sent = self._ends = 0

    @property
    def is_over(self) -> bool:
        """Whether all requests of the transaction were answered, and a single one ends it.

        A transaction without requests is over, since brokers do not know of it.
        """
        return self.tells and not self._waiting and self._ends == (1 if self._sent else 0)
