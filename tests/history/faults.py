"""Faults of a history: stops of processes, disks and databases, and cheap changes."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from notify.demo.kafka import KafkaCluster
from notify.errors import NotifyError
from notify.testing.process import ServerProcess
from tests.history.actors import FEW, ORDERED, TOPIC
from tests.history.administration import admin, redrive
from tests.history.stage import Stage
from tests.support.clock import eventually

MOST_QUEUES = 200
STOPPED_SECONDS = (1.0, 5.0)
"""Seconds of a stop, longer and shorter than the consumers' leases of 3 s."""
UNDONE_SECONDS = 120.0
"""The longest wait for a fault to be undone, on a machine that a history loads."""
RETRIES = {"retry_min": 0.2, "retry_max": 2.0}


class Faults:
    """Makes faults in turn, each kind equally often, until it is stopped."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        """How often each fault was made."""
        self.refused: Counter[str] = Counter()
        """Cheap faults that the server refused, for example because it was away."""
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._go_on, args=(kinds, pause))
            for kinds, pause in (
                *((self._stops_of(name, server), 3.0) for name, server in stage.servers.by_name.items()),
                (self._stops_of_databases(), 0.3),
                (self._stops_of_nodes(), 3.0),
                (self._stops_of_actors(), 0.3),
                (self._cheap(), 0.2),
            )
            if kinds
        ]
        self._failure: BaseException | None = None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop, with everything running again. Raises a fault's own failure."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _go_on(self, kinds: dict[str, Callable[[], None]], pause: float) -> None:
        waiting = [name for name in kinds if name == "server killed"]  # however short the history is
        try:
            while not self._over.wait(pause * 2 * self._chance.random()):
                if not waiting:
                    waiting = self._chance.sample(list(kinds), len(kinds))
                name = waiting.pop()
                try:
                    kinds[name]()
                except NotifyError:
                    self.refused[name] += 1
                else:
                    self.done[name] += 1
        except BaseException as error:
            self._failure = error

    # --- stops -------------------------------------------------------------------------------------------------

    def _stops_of(self, name: str, server: ServerProcess) -> dict[str, Callable[[], None]]:
        return {
            f"{name} killed": lambda: self._kill(server),
            f"{name} stopped": lambda: self._stop_a_while(server.process),
        }

    def _stops_of_databases(self) -> dict[str, Callable[[], None]]:
        stage = self._stage
        kinds: dict[str, Callable[[], None]] = {}
        for name, database in stage.scene.databases.items():
            kinds[f"{name} restarted"] = lambda database=database: self._restart(database)  # type: ignore[misc]
        if stage.room.can_fill:
            kinds["disk full"] = self._fill_disk
        return kinds

    def _stops_of_nodes(self) -> dict[str, Callable[[], None]]:
        kafka = self._stage.scene.kafka
        return {} if kafka is None else {"node killed": lambda: self._kill_node(kafka)}

    def _stops_of_actors(self) -> dict[str, Callable[[], None]]:
        stage = self._stage
        kinds: dict[str, Callable[[], None]] = {}
        for name in stage.actors:
            kinds[f"{name} killed"] = lambda name=name: stage.restart(name)  # type: ignore[misc]
        for name in ("consumer shared", "consumer ordered", *stage.movers):
            kinds[f"{name} stopped"] = lambda name=name: self._stop_a_while(  # type: ignore[misc]
                stage.actors[name].process
            )
        return kinds

    def _kill(self, server: ServerProcess) -> None:
        """Kill a server and start it again, which it refuses while its disk is full."""
        server.kill()

        def is_started() -> bool:
            try:
                server.start()
            except NotifyError:
                return False
            return True

        eventually(is_started, f"{server.url} to start again", UNDONE_SECONDS)

    def _stop_a_while(self, process: Any) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._chance.uniform(*STOPPED_SECONDS))  # how long it is stopped
        process.send_signal(signal.SIGCONT)

    def _restart(self, database: Any) -> None:
        database.kill()
        time.sleep(self._chance.random())  # how long it is away
        database.start()

    def _kill_node(self, kafka: KafkaCluster) -> None:
        node = self._chance.randrange(kafka.nodes)
        kafka.kill_node(node)
        time.sleep(self._chance.uniform(*STOPPED_SECONDS))  # how long it is away
        kafka.start_node(node)
        kafka.wait_for_node(node)

    def _fill_disk(self) -> None:
        self._stage.room.fill()
        time.sleep(self._chance.uniform(0.5, 3.0))  # how long it is full
        self._stage.room.free()

    # --- cheap changes -----------------------------------------------------------------------------------------

    def _cheap(self) -> dict[str, Callable[[], None]]:
        everywhere: dict[str, Callable[[], None]] = {
            "replayed": self._replay,
            "redriven": lambda: redrive(self._stage.url, self._chance.choice(("shared", "ordered", "failover"))),
            "paused": self._pause,
        }
        if self._stage.servers.kafka_url:  # Kafka keeps no modes, and a topic that grows there moves its keys
            return everywhere
        return everywhere | {"topic grown": self._grow, "mode changed": self._change_mode}

    def _admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return admin(self._stage.url, method, path, body)

    def _grow(self) -> None:
        topic = self._chance.choice((TOPIC, ORDERED, FEW))
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
        """Reset a group by a few seconds; one that is further behind is left alone, as it would skip messages."""
        since = datetime.now(UTC) - timedelta(seconds=self._chance.uniform(2.0, 20.0))
        to = {"topic": TOPIC, "to": since.isoformat()}
        preview = self._admin("POST", "groups/shared/reset", to | {"dry_run": True})
        if not any(queue["left_out"] for queue in preview["result"]["queues"]):
            self._admin("POST", "groups/shared/reset", to)

    def _pause(self) -> None:
        group = self._chance.choice(("shared", "ordered", "failover"))
        try:
            self._admin("POST", f"groups/{group}/pause")
            time.sleep(0.3)  # how long it is paused
        finally:  # also where the answer was lost
            self._insist("POST", f"groups/{group}/resume")

    def _insist(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Repeat a request until it succeeds, also after the end of the faults, so that every change is undone."""

        refusals: list[NotifyError] = []

        def is_done() -> bool:
            try:
                self._admin(method, path, body)
            except NotifyError as refusal:
                refusals[:] = [refusal]
                return False
            return True

        try:
            eventually(is_done, f"{method} {path} to be carried out", UNDONE_SECONDS)
        except AssertionError as complaint:
            complaint.add_note(f"the last refusal: {refusals}")
            raise
