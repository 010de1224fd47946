"""Cheap changes of a history, made by a server's admin routes: replays, redrives, pauses, more queues, other modes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from notify.errors import Conflict, NotifyError, Unavailable
from tests.history.actors import RETRIES
from tests.history.administration import admin, dead_letters, redrive
from tests.history.messages import FEW, ORDERED, TOPIC, TOPICS
from tests.history.stage import Stage

T = TypeVar("T")
MOST_QUEUES = 200
UNDONE_SECONDS = 120.0
"""The longest wait for a fault to be undone, from when no other is made any more."""
COMMAND_SECONDS = 150.0
"""A server that waits for Kafka takes 60 s at most, and a command 3 s of CPU, which are many on a busy machine."""
AGAIN_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
"""A change that is refused is asked for again for so long: there are few, and each server is killed often, and away for
half a minute where its disk is full meanwhile."""
REFUSED_SECONDS = 1.0
"""The pause between two such requests."""
REPLAYED_SECONDS = (2.0, 20.0)
REPLAYED_SECONDS_OF_KAFKA = (20.0, 60.0)
LONGER = 2.0
"""A replay that would leave something out, or find a partition without a record, goes back so many times as far."""
MOST_REPLAYED_SECONDS = 130.0
MOST_REPLAYED_SECONDS_OF_KAFKA = 5000.0
"""Where callers wait until a group has caught up, the newest message of a partition may be as old as the history."""
STEERED = {"shared": TOPIC, "ordered": ORDERED, "failover": FEW}
"""The groups, by the topic of each, that are paused and replayed, and whose dead letters are sent again beside all
faults."""


class NotUndone(Exception):
    """A change could not be undone though no fault was made any more."""


class Changes:
    """Raises NotifyError where a server is unreachable, or a change cannot be now."""

    def __init__(self, stage: Stage, chance: random.Random, over: threading.Event) -> None:
        """`over`: set when no further fault is made."""
        self._stage = stage
        self._chance = chance
        self._over = over

    def kinds(self) -> Mapping[str, Callable[[], None]]:
        everywhere: dict[str, Callable[[], None]] = {
            "replayed": self._replay,
            "redriven": lambda: self._patiently(partial(self._redrive, by_command=False)),
            "paused": self._pause,
        }
        if self._stage.scene.kafka:  # Kafka keeps no modes, and a topic that grows there moves its keys
            by_command = partial(self._redrive, by_command=True)
            return everywhere | {"redriven by command": lambda: self._patiently(by_command)}
        return everywhere | {"topic grown": self._grow, "mode changed": self._change_mode}

    def _admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return admin(self._stage.url, method, path, body)

    def _redrive(self, *, by_command: bool) -> None:
        waiting = [
            group for group in STEERED if any(not letter["redriven"] for letter in dead_letters(self._stage.url, group))
        ]
        if not waiting:
            raise Conflict("no group has dead letters")
        group = self._chance.choice(waiting)
        if not by_command:
            redrive(self._stage.url, group)
            return
        words = ["dead-letter", "redrive", group, "--max", "100", "--reason", "a history", "--url", self._stage.url]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "notify.cli.main", *words],
                capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{' '.join(words)}: no answer within {COMMAND_SECONDS:g} s") from None
        if done.returncode:
            raise Conflict(f"{' '.join(words)}: {done.stderr}")

    def _grow(self) -> None:
        topic = self._chance.choice(TOPICS)
        queues = len(self._admin("GET", f"topics/{topic}")["queues"])
        if queues < MOST_QUEUES:
            self._admin("PUT", f"topics/{topic}", {"queues": queues + 1})

    def _change_mode(self) -> None:
        """Change a mode for a moment; consumers that start meanwhile are refused and try again."""
        path = f"groups/shared/subscriptions/{TOPIC}"
        try:
            mode = self._chance.choice(("failover", "ordered"))
            self._admin("PUT", path, {"mode": mode, "force": True, **RETRIES})
            time.sleep(0.2)  # how long it is so
        finally:  # also where the answer was lost
            self._insist("PUT", path, {"mode": "shared", "force": True, **RETRIES})

    def _replay(self) -> None:
        """Reset a group by some seconds; a partition that is further behind would skip messages."""
        behind: list[str] = []
        until = time.monotonic() + PATIENCE_SECONDS
        for group in self._chance.sample(list(STEERED), len(STEERED)):
            skipped = self._patiently(partial(self._replay_of, group), until)
            if not skipped:
                return
            behind.append(f"{group}: {skipped[:3]}")
        raise Conflict(f"all groups are too far behind: {behind}")

    def _patiently(self, change: Callable[[], T], until: float | None = None) -> T:
        """The result of a change that is asked for again while the server, or Kafka, is unreachable, until that
        instant."""
        until = time.monotonic() + PATIENCE_SECONDS if until is None else until
        while True:
            try:
                return change()
            except NotifyError:
                if time.monotonic() > until or self._over.wait(REFUSED_SECONDS):
                    raise

    def _replay_of(self, group: str) -> list[dict[str, Any]]:
        """Reset a group by some seconds. Empty where that was done, else queues in which too much would be skipped."""
        is_over_kafka = self._stage.scene.kafka is not None
        least, most = REPLAYED_SECONDS_OF_KAFKA if is_over_kafka else REPLAYED_SECONDS
        bound = MOST_REPLAYED_SECONDS_OF_KAFKA if is_over_kafka else MOST_REPLAYED_SECONDS
        seconds = self._chance.uniform(least, most)
        skipped: list[dict[str, Any]] = []
        while seconds < bound:
            to = {"topic": STEERED[group], "to": (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()}
            skipped = self._skipped(group, to)
            if not skipped:
                self._admin("POST", f"groups/{group}/reset", to)
                return []
            seconds *= LONGER
        return skipped

    def _skipped(self, group: str, to: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The queues in which a reset would leave something out."""
        queues = self._admin("POST", f"groups/{group}/reset", {**to, "dry_run": True})["result"]["queues"]
        # Over Kafka the reset is carried out later, and finds the same records only where there is one by now.
        least = 1 if self._stage.scene.kafka else 0
        return [queue for queue in queues if queue["left_out"] or queue["again"] < least]

    def _pause(self) -> None:
        group = self._chance.choice(list(STEERED))
        # Consumers over Kafka obey within 5 s.
        seconds = self._chance.uniform(0.3, 6.0) if self._stage.scene.kafka else 0.3
        try:
            self._patiently(partial(self._admin, "POST", f"groups/{group}/pause"))
            time.sleep(seconds)  # how long it is paused
        finally:  # also where the answer was lost
            self._insist("POST", f"groups/{group}/resume")

    def _insist(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Repeat a request until it succeeds, also after the end of the faults, so that every change is undone.

        While servers and nodes are being stopped they may refuse it for long.
        """
        refusals: list[NotifyError] = []
        over_at = float("inf")

        def is_done() -> bool:
            try:
                self._admin(method, path, body)
            except NotifyError as refusal:
                refusals[:] = [refusal]
                return False
            return True

        while not is_done():
            if self._over.wait(AGAIN_SECONDS):
                over_at = min(over_at, time.monotonic())
                if time.monotonic() > over_at + UNDONE_SECONDS:
                    raise NotUndone(f"{method} {path} was refused for {UNDONE_SECONDS:g} s: {refusals[0]}")
                time.sleep(AGAIN_SECONDS)  # the pause between two requests
