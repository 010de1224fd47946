"""Handlers of a history are slow, hang, fail, refuse for good, and die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from notify.client import DeadLetter, ReceivedMessage
from tests.history.messages import is_deadly, is_poison
from tests.history.tables import Notes, read_notes

MOST_DEATHS = 2
"""How often a message kills the process of a notes file."""


class Misbehaviour:
    """Belongs to one process, whose notes say what it did before it was started again."""

    def __init__(self, notes: Path, group: str, max_attempts: int) -> None:
        earlier = read_notes(notes)
        self._notes = Notes(notes)
        self._group = group
        self._has_letters = group != "broadcast"  # its dead letters cannot be redriven
        self._max_attempts = max_attempts
        self._cured = {words[2] for words in earlier if words[0] == "poison" and len(words) == 3}
        self._deaths = Counter(words[2] for words in earlier if words[0] == "deadly" and len(words) == 3)
        self._chance = random.Random()

    def before(self, message: ReceivedMessage) -> float:
        """The seconds that the handler takes. Raises the handler's failure."""
        body = message.json()
        number = body["number"]
        if body["not_before"] > time.time():
            self._notes.add("early", self._group, number, f"{body['not_before'] - time.time():.3f}")
        self._be_poisoned(number, message.attempt)
        chance = self._chance.random()
        if chance < 0.004 and self._has_letters:
            self._notes.add("refused", self._group, number)
            raise DeadLetter("a handler refuses it for good")
        if chance < 0.02:
            self._notes.add("failed", self._group, number)
            raise ValueError("a handler fails")
        return 7.0 if chance < 0.0205 else 0.05 if chance < 0.04 else 0.0

    def _be_poisoned(self, number: str, attempt: int) -> None:
        if not self._has_letters:
            return
        if is_deadly(number) and self._deaths[number] < MOST_DEATHS:
            self._deaths[number] += 1
            self._notes.add("deadly", self._group, number)
            os.kill(os.getpid(), signal.SIGKILL)
        if is_poison(number) and number not in self._cured:
            if attempt >= self._max_attempts:  # the last one, unless deaths are among them
                self._cured.add(number)
                self._notes.add("poison", self._group, number)
            raise ValueError("a handler fails on poison")
