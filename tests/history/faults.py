"""Faults of a history: stops of processes, disks, databases and Kafka's nodes, and cheap changes beside them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from notify.errors import NotifyError, Unavailable
from notify.testing.process import ServerProcess
from tests.history.administration import Failed
from tests.history.changes import UNDONE_SECONDS, Changes, NotUndone
from tests.history.stage import Stage
from tests.support.clock import eventually
from tests.support.kafka_proxy import Api, Fault, Which
from tools.kafka_cluster import KafkaCluster

STOPPED_SECONDS = (1.0, 5.0)
"""Seconds of a stop, longer and shorter than the consumers' leases of 3 s."""
STOPPED_SECONDS_OF_KAFKA = (1.0, 9.0)
"""Longer and shorter than the 6 s after which Kafka gives a silent member's partitions to others."""
JOINED_SECONDS = (2.0, 8.0)
COMES_SECONDS, LATE_SECONDS = 20.0, 3.0
"""How long a request is waited for that arrives late, and how late it is at the most."""
LATE = {
    "commit of a bridge late": Which(Api.END_TXN, b"notify-bridge-", commit=True),
    "commit of a consumer late": Which(Api.END_TXN, b"notify-group.", commit=True),
    "commit of a releaser late": Which(Api.END_TXN, b"notify-delays-", commit=True),
    "offsets of a consumer late": Which(Api.TXN_OFFSET_COMMIT, b"notify-group."),
    "records of a bridge late": Which(Api.PRODUCE, b"notify-bridge-"),
}
"""Requests whose first bytes arrive while Kafka's client, which has repeated them, is in its next transaction."""
ABORT = Which(Api.END_TXN, b"notify-", commit=False)
LOOK_SECONDS = 0.02
ACTORS = ("consumer ", "producer ", "bridge ", "relay ")
Kinds = Mapping[str, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between two faults of one sort, in the mean."""

    servers: float
    databases: float
    nodes: float
    requests: float
    kills: float
    freezes: float
    """0: kills and freezes by turns, with the pause of kills."""
    rebalances: float
    changes: float


PAUSES = Pauses(
    servers=3.0, databases=0.3, nodes=0.0, requests=0.0, kills=0.3, freezes=0.0, rebalances=0.0, changes=0.2
)
PAUSES_OVER_KAFKA = Pauses(
    servers=40.0, databases=20.0, nodes=0.5, requests=2.0, kills=10.0, freezes=8.0, rebalances=12.0, changes=2.5
)  # fmt: skip
"""Fewer stops: there are more processes, each of which takes a second of CPU to start, and each must come to work."""
TURNS = {"node killed": 3}
"""Kinds that have their turn more often than others of their sort. One node at a time is down."""


def _pid_of(server: ServerProcess) -> int:
    assert server.process is not None
    return server.process.pid


class Faults:
    """Makes faults in turn, each kind equally often, until it is stopped."""

    def __init__(self, stage: Stage, seed: int, calm_seconds: float = 0.0) -> None:
        """Servers, databases and Kafka's nodes are stopped from when each change was made once, or has been tried for
        `calm_seconds`: beside all stops a short history on a busy machine made some changes never."""
        self._stage = stage
        self._chance = random.Random(seed)
        self._stopped_seconds = STOPPED_SECONDS_OF_KAFKA if stage.scene.kafka else STOPPED_SECONDS
        self.done: Counter[str] = Counter()
        """How often each fault was made."""
        self.refused: Counter[str] = Counter()
        """How often a fault was refused, for example because the server was unreachable."""
        self.refusals: Counter[str] = Counter()
        """The refusals, by their texts."""
        self.failed: list[str] = []
        """A sentence for each request that a server failed on by a fault of its own."""
        self.died: list[str] = []
        """A sentence for each server that ended by itself."""
        self._over = threading.Event()
        self._only_changes = threading.Event()
        self._changes = Changes(stage, self._chance, self._over).kinds()
        self._calm_until = time.monotonic() + calm_seconds
        pauses = PAUSES_OVER_KAFKA if stage.scene.kafka else PAUSES
        self._kinds = [
            (kinds, pause)
            for kinds, pause in (
                *((self._stops_of(name, server), pauses.servers) for name, server in stage.servers.by_name.items()),
                (self._stops_of_databases(), pauses.databases),
                (self._stops_of_nodes(), pauses.nodes),
                (self._late_requests(), pauses.requests),
                *self._stops_of_actors(pauses),
                (self._rebalances(), pauses.rebalances),
                (self._changes, pauses.changes),
            )
            if kinds
        ]
        self._threads = [threading.Thread(target=self._go_on, args=of) for of in self._kinds]
        if stage.scene.proxies:  # nothing aborts a transaction but faults, so that whatever is aborted is late
            self._threads.append(threading.Thread(target=self._late_aborts))
        self.broken: list[str] = []
        """A sentence for each fault that failed itself: what it stopped may still be stopped, and none of its sort
        follows."""

    @property
    def never_made(self) -> list[str]:
        """The kinds of faults that were not made once."""
        return [name for kinds, _ in self._kinds for name in kinds if not self.done[name]]

    @property
    def lacks_only_changes(self) -> bool:
        """Whether nothing but changes was never made."""
        return all(name in self._changes for name in self.never_made)

    @property
    def kills(self) -> list[str]:
        """The kinds that kill one process, a database among them, and start it again."""
        return [name for kinds, _ in self._kinds for name in kinds if name.endswith((" killed", " restarted"))]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def only_changes(self) -> None:
        """Make no other fault from now on: beside stops a group on a busy machine never catches up, to be replayed."""
        self._only_changes.set()

    def stop(self) -> None:
        """Stop, with everything running again."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for name, server in self._stage.servers.by_name.items():
            if self._look(name, server):
                try:
                    server.start()
                except NotifyError as refusal:
                    self.broken.append(f"{name} does not start again: {refusal}")

    def _go_on(self, kinds: Kinds, pause: float) -> None:
        waiting = [name for name in kinds if name in ("server killed", "node killed")]  # however short the history is
        is_of_actors = any(name.startswith(ACTORS) for name in kinds)
        name = "none yet"
        try:
            while not self._over.wait(pause * self._stage.scene.slower * 2 * self._chance.random()):
                if kinds is not self._changes and (self._only_changes.is_set() or (self._is_calm and not is_of_actors)):
                    continue
                if not waiting:
                    new = [name for name in kinds if not self.done[name]] if kinds is self._changes else []
                    turns = new or [name for name in kinds for _ in range(TURNS.get(name, 1))]
                    waiting = self._chance.sample(turns, len(turns))
                name = waiting.pop()
                try:
                    kinds[name]()
                except Failed as failure:
                    self.failed.append(f"{name}: {failure}: {''.join(self._stage.servers.queue.output)[-4000:]}")
                except NotUndone as failure:
                    self.failed.append(f"{name}: {failure}")
                except (NotifyError, ProcessLookupError) as refusal:  # a process that has ended cannot be stopped
                    self.refused[name] += 1
                    self.refusals[f"{name}: {refusal}"] += 1
                else:
                    self.done[name] += 1
        except BaseException as failure:
            traceback.print_exc()
            self.broken.append(f"the fault {name!r} failed itself: {type(failure).__name__}: {failure}")

    @property
    def _is_calm(self) -> bool:
        """Whether what everybody needs is left alone: not every change was made once, and it is still early."""
        return time.monotonic() < self._calm_until and not all(self.done[name] for name in self._changes)

    # --- kinds -------------------------------------------------------------------------------------------------

    def _stops_of(self, name: str, server: ServerProcess) -> Kinds:
        stops = {
            f"{name} killed": lambda: self._kill(name, server),
            f"{name} frozen": lambda: self._freeze(_pid_of(server)),
        }
        if self._stage.scene.workers > 1:
            stops |= {
                "worker killed": lambda: os.kill(self._a_worker(server), signal.SIGKILL),
                "worker frozen": lambda: self._freeze(self._a_worker(server)),
                "server killed with its workers": lambda: self._kill(name, server, workers=True),
            }
        return stops

    def _a_worker(self, server: ServerProcess) -> int:
        """Raises Unavailable while none runs."""
        workers = server.workers()
        if not workers:
            raise Unavailable("no worker runs")
        return self._chance.choice(workers)

    def _stops_of_databases(self) -> Kinds:
        stage = self._stage
        kinds: dict[str, Callable[[], None]] = {}
        for name, database in stage.scene.databases.items():
            kinds[f"{name} restarted"] = lambda database=database: self._restart(database)  # type: ignore[misc]
        if stage.room.can_fill:
            kinds["disk full"] = self._fill_disk
        return kinds

    def _stops_of_nodes(self) -> Kinds:
        kafka = self._stage.scene.kafka
        if kafka is None:
            return {}
        return {"node killed": lambda: self._kill_node(kafka), "node frozen": lambda: self._freeze_node(kafka)}

    def _late_requests(self) -> Kinds:
        if not self._stage.scene.proxies:
            return {}
        return {name: lambda which=which: self._be_late(which, COMES_SECONDS) for name, which in LATE.items()}  # type: ignore[misc]

    def _stops_of_actors(self, pauses: Pauses) -> list[tuple[Kinds, float]]:
        """Kills and freezes: by turns, or with pauses of their own."""
        kills, freezes = self._kills_of_actors(), self._freezes_of_actors()
        return (
            [({**kills, **freezes}, pauses.kills)]
            if pauses.freezes == 0.0
            else [(kills, pauses.kills), (freezes, pauses.freezes)]
        )

    def _kills_of_actors(self) -> Kinds:
        return {f"{name} killed": actor.restart for name, actor in self._stage.actors.items()}

    def _freezes_of_actors(self) -> Kinds:
        stage = self._stage
        kinds: dict[str, Callable[[], None]] = {}
        all_of_them = [name for name in stage.actors if name.startswith("consumer ")]
        consumers = all_of_them if stage.scene.kafka else ["consumer shared", "consumer ordered"]
        for name in (*consumers, *stage.movers):
            kinds[f"{name} frozen"] = lambda name=name: self._freeze(stage.actors[name].process.pid)  # type: ignore[misc]
        for name in stage.movers if stage.scene.kafka else ():
            kinds[f"{name} replaced while frozen"] = lambda name=name: stage.actors[name].replace(  # type: ignore[misc]
                self._chance.uniform(*self._stopped_seconds)
            )
        return kinds

    def _rebalances(self) -> Kinds:
        return {f"{name} joined and left": lambda name=name: self._visit(name) for name in self._stage.guests}  # type: ignore[misc]

    # --- stops -------------------------------------------------------------------------------------------------

    def _kill(self, name: str, server: ServerProcess, *, workers: bool = False) -> None:
        """Kill a server and start it again, which it refuses while its disk is full.

        `workers`: kill its workers at the same moment, which otherwise stop when they notice.
        """
        self._look(name, server)
        victims = server.workers() if workers else []
        server.kill()
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

        def is_started() -> bool:
            try:
                server.start()
            except NotifyError:
                return False
            return True

        eventually(is_started, f"{server.url} to start again", UNDONE_SECONDS)

    def _look(self, name: str, server: ServerProcess) -> bool:
        """Whether a server has ended by itself; that is noted."""
        code = None if server.process is None else server.process.poll()
        if code is not None:
            self.died.append(f"{name} ended by itself with {code}: {''.join(server.output)[-2000:]}")
        return code is not None

    def _freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._chance.uniform(*self._stopped_seconds))  # how long it is stopped
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _restart(self, database: Any) -> None:
        database.kill()
        time.sleep(self._chance.random())  # how long it is unreachable
        database.start()

    def _kill_node(self, kafka: KafkaCluster) -> None:
        node = self._chance.randrange(kafka.nodes)
        kafka.kill_node(node)
        time.sleep(self._chance.uniform(*STOPPED_SECONDS))  # how long it is unreachable
        kafka.start_node(node)
        kafka.wait_for_node(node)

    def _freeze_node(self, kafka: KafkaCluster) -> None:
        node = self._chance.randrange(kafka.nodes)
        kafka.signal_node(node, signal.SIGSTOP)
        time.sleep(self._chance.uniform(*self._stopped_seconds))  # how long it is stopped
        kafka.signal_node(node, signal.SIGCONT)

    def _be_late(self, which: Which, comes_seconds: float) -> None:
        """Let a request arrive late, before a record of the next transaction or after a while. Raises Unavailable if
        none comes."""
        until = (Which(Api.END_TXN, which.about), Which(Api.PRODUCE, which.about, nth=self._chance.randint(1, 3)))
        proxies = self._stage.scene.proxies
        planned = {proxy: proxy.plan(which, Fault.LATE, until) for proxy in proxies}
        try:
            self._wait(lambda: any(each.has_hit for each in planned.values()), comes_seconds)
            hit = [each for each in planned.values() if each.has_hit]
            if not hit:
                raise Unavailable("no such request comes")
            self._wait(lambda: all(each.is_over for each in hit), LATE_SECONDS * self._chance.random())
        finally:
            for proxy, each in planned.items():
                proxy.withdraw(each)

    def _late_aborts(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Unavailable):
                self._be_late(ABORT, COMES_SECONDS)
                self.done["abort late"] += 1

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, for so long or until faults end."""
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline and not self._over.wait(LOOK_SECONDS):
            pass

    def _fill_disk(self) -> None:
        self._stage.room.fill()
        time.sleep(self._chance.uniform(0.5, 3.0))  # how long it is full
        self._stage.room.free()

    def _visit(self, name: str) -> None:
        """Have another instance join a group, and leave it again."""
        guest = self._stage.guests[name]
        guest.start()
        time.sleep(self._chance.uniform(*JOINED_SECONDS))  # how long it takes part
        guest.leave()
