"""The stage of a history: databases, a server, bridges and relays, producers and consumers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.client.table import half_message
from notify.errors import NotifyError
from notify.testing.process import ServerProcess
from tests.history.actors import FEW, ORDERED, OUTBOX_CALLER, TOPIC
from tests.history.administration import admin, redrive
from tests.history.checker import Effect, History
from tests.history.room import Room
from tests.history.scene import Scene
from tests.history.tables import EffectRow, Intent, make_tables, open_engine, read_notes
from tests.support.clock import eventually
from tests.support.groups import is_subscribed
from tests.support.http import ask

GROUPS = ("shared", "ordered", "failover", "exclusive", "broadcast")
GROUPS_OF_KAFKA = ("shared", "ordered", "failover", "exclusive")
"""Kafka has a group for each instance of a broadcast, and none for all of them."""
EXPECTED = {"shared": TOPIC, "ordered": ORDERED, "failover": FEW, "exclusive": FEW, "broadcast@x": FEW}
"""The topic of which each consumer must have every message."""


MOST_SETTLE_SECONDS = 1800.0
"""The longest wait for the end, however much still changes: a message that comes again and again is stuck, too."""
HELD_LAG = 50_000
"""The most messages that a group may be behind; beyond it callers wait until the group catches up."""


class Actor:
    """A process of the history, which may be killed and started again with the same arguments."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._words = [sys.executable, "-m", *words]
        self._log = log
        self.process: Any = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._words, stdout=log, stderr=subprocess.STDOUT, env=os.environ, start_new_session=True
            )

    def kill(self) -> None:
        """Kill it with SIGKILL, also if it is stopped."""
        self.process.kill()
        self.process.wait(60)

    def close(self, seconds: float = 30.0) -> None:
        """End it, by SIGTERM if that suffices."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()


class Stage:
    """All processes of a history, and their facts at the end."""

    def __init__(self, directory: Path, room: Room, scene: Scene) -> None:
        self.directory = directory
        self.room = room
        self.scene = scene
        self.sources = scene.sources
        self.servers = scene.servers(room.directory)
        self.actors: dict[str, Actor] = {}
        self.movers: list[str] = []
        """The bridges and relays among them."""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the server that shows and steers the groups."""
        return self.servers.queue.url

    @property
    def groups(self) -> Sequence[str]:
        """The groups that are shown, broadcasts' instances apart."""
        return GROUPS_OF_KAFKA if self.servers.kafka_url else GROUPS

    @property
    def _any_sender(self) -> ServerProcess:
        """A server that knows all transactions."""
        return next(iter(self.servers.senders.values()))

    def start(self, stack: ExitStack) -> None:
        """Start everything; the stack ends it."""
        for dsn in self.sources.values():
            make_tables(dsn)
        self.servers.start(stack)
        self._consume(stack)
        self._produce(stack)

    def _produce(self, stack: ExitStack) -> None:
        for name, dsn in self.sources.items():
            mover = "bridge" if dsn.startswith("mysql") else "relay"
            self.movers.append(f"{mover} {name}")
            self._add(
                f"{mover} {name}", ["notify.cli.main", mover, "--dsn", dsn, "--url", self.servers.queue_url], stack
            )
            spec = {
                "source": name,
                "dsn": dsn,
                "async_dsn": dsn if dsn.startswith("postgresql+psycopg") else "",
                "callers": self.scene.callers,
                "stop": str(self.directory / "stop"),
                "hold": str(self.directory / "hold"),
                "end": str(self.directory / "end"),
            }
            self._add_actor(f"producer {name}", "produce", spec | {"url": self.servers.send_url}, stack)

    def _consume(self, stack: ExitStack) -> None:
        """Start consumers and wait until they subscribe: an instance receives no earlier broadcasts."""
        dsns = list(self.sources.values())
        first, last = dsns[0], dsns[-1]
        for who, group, mode, dsn in (
            ("shared", "shared", "shared", first),
            ("ordered", "ordered", "ordered", last),
            ("failover", "failover", "failover", first),
            ("exclusive", "exclusive", "exclusive", last),
            ("broadcast@x", "broadcast", "broadcast", first),
        ):
            spec = {
                "who": who, "group": group, "mode": mode, "dsn": dsn, "instance": "x", "topic": EXPECTED[who]
            }  # fmt: skip
            if group == "failover" and dsn.startswith("postgresql+psycopg"):
                spec["async_dsn"] = dsn
            self._add_actor(f"consumer {group}", "consume", spec, stack)
        standby = {
            "who": "failover",
            "group": "failover",
            "mode": "failover",
            "dsn": first,
            "instance": "y",
            "topic": FEW,
        }
        self._add_actor("consumer standby", "consume", standby, stack)
        for group in (*self.groups, "broadcast@x"):
            eventually(lambda group=group: is_subscribed(self.url, group), f"{group} to be subscribed")  # type: ignore[misc]

    def _add_actor(self, name: str, role: str, spec: dict[str, Any], stack: ExitStack) -> None:
        spec = {"url": self.servers.queue_url} | spec | {"notes": str(self.directory / f"{name}.notes")}
        self._add(name, ["tests.history.actors", role, json.dumps(spec)], stack)

    def _add(self, name: str, words: Sequence[str], stack: ExitStack) -> None:
        actor = self.actors[name] = Actor(words, self.directory / f"{name}.log")
        actor.start()
        stack.callback(actor.close)

    def restart(self, name: str) -> None:
        """Kill a process, and start it again."""
        self.actors[name].kill()
        self.actors[name].start()

    def hold_or_not(self) -> None:
        """Make callers wait while a group is far behind; the server may be away."""
        with contextlib.suppress(NotifyError):
            groups = admin(self.url, "GET", "groups")["groups"]
            held = self.directory / "hold"
            if max((group["lag"] for group in groups), default=0) > HELD_LAG:
                held.touch()
            else:
                held.unlink(missing_ok=True)

    # --- the end ----------------------------------------------------------------------------------------------

    def settle(self, seconds: float) -> list[str]:
        """Stop intents, and wait until nothing is undecided and no group is behind.

        Returns what still waits once nothing has changed for `seconds`: a large lag takes long on a slow machine, but a
        stuck message does not change.
        """
        (self.directory / "stop").touch()
        end = time.monotonic() + MOST_SETTLE_SECONDS
        deadline = time.monotonic() + seconds
        quiet = 0
        waiting = ["nobody has looked yet"]
        while time.monotonic() < min(deadline, end):
            before = waiting
            try:
                waiting = self._waiting()
            except (NotifyError, sa.exc.OperationalError) as error:
                waiting = [str(error)]
            if waiting != before:
                deadline = time.monotonic() + seconds
            quiet = quiet + 1 if not waiting else 0
            if quiet == 3:
                break
            time.sleep(0.5)  # the pause between two looks
        (self.directory / "end").touch()
        return waiting if quiet < 3 else []

    def _waiting(self) -> list[str]:
        waiting = self._without_effect() if self.servers.kafka_url else self._behind()
        for name in self.sources:
            sent_to = self._any_sender.url
            open_ = admin(sent_to, "GET", f"transactions?producer_group={name}")["transactions"]
            waiting += [f"transaction {t['id']} of {name} is {t['state']}" for t in open_[:3]]
        for group in self.groups:
            redrive(self.url, group)
            letters = admin(self.url, "GET", f"groups/{group}/dead-letters")["messages"]
            left = sum(not letter["redriven"] for letter in letters)
            if left:
                waiting.append(f"{left} dead letters of {group} were not sent again")
        return waiting

    def _behind(self) -> list[str]:
        """Messages that are in no queue, and groups that are behind."""
        waiting = []
        committed = sum(self._committed(dsn) for dsn in self.sources.values())
        topics = [admin(self.url, "GET", f"topics/{topic}") for topic in (TOPIC, ORDERED, FEW)]
        queued = sum(queue["end"] for topic in topics for queue in topic["queues"])
        if queued < committed:
            waiting.append(f"{committed - queued} of {committed} committed messages are in no queue")
        for group in (*GROUPS, "broadcast@x"):
            shown = admin(self.url, "GET", f"groups/{group}")
            lag = sum(queue["lag"] for queue in shown["queues"])
            if lag or shown["paused"]:
                waiting.append(f"group {group} is {lag} behind{', and paused' if shown['paused'] else ''}")
        return waiting

    def _without_effect(self) -> list[str]:
        """Messages without their effect: offsets of Kafka also count the records of its transactions."""
        committed: Counter[str] = Counter()
        had: Counter[str] = Counter()
        for dsn in self.sources.values():
            engine = open_engine(dsn)
            try:
                with engine.connect() as connection:
                    topics = sa.select(Intent.topic, sa.func.count()).group_by(Intent.topic)
                    committed.update(dict(connection.execute(topics).tuples().all()))
                    takers = sa.select(EffectRow.who, sa.func.count()).group_by(EffectRow.who)
                    had.update(dict(connection.execute(takers).tuples().all()))
            finally:
                engine.dispose()
        return [
            f"{committed[topic] - had[who]} of {committed[topic]} messages of {topic} had no effect in {who}"
            for who, topic in EXPECTED.items()
            if had[who] < committed[topic]
        ]

    def _committed(self, dsn: str) -> int:
        engine = open_engine(dsn)
        try:
            with engine.connect() as connection:
                return connection.scalar(sa.select(sa.func.count()).select_from(Intent)) or 0
        finally:
            engine.dispose()

    def history(self, unsettled: Sequence[str]) -> History:
        """The facts of the run."""
        history = History(
            expected=dict(EXPECTED),
            ordered=frozenset(("ordered",)),
            unsettled=list(unsettled),
        )
        for name, dsn in self.sources.items():
            engine = open_engine(dsn)
            with engine.connect() as connection:
                rows = connection.execute(sa.select(Intent.number, Intent.key, Intent.topic).order_by(Intent.id)).all()
                numbers = {row.number: row.topic for row in rows}
                for row in rows:
                    if row.key.startswith(f"{name}{OUTBOX_CALLER}-"):
                        history.moved_in_order.setdefault(row.key, []).append(row.number)
                history.committed |= numbers
                history.intents |= {number.partition(".")[0] for number in numbers}
                for row in connection.execute(sa.select(EffectRow).order_by(EffectRow.id)):
                    history.effects.append(
                        Effect(row.who, row.number, row.key, row.queue, row.offset, row.committed_at)
                    )
                h = half_message.c
                halves = connection.execute(sa.select(h.transaction_id, h.mode, h.state).distinct()).all()
            engine.dispose()
            # The queue server alone knows what an outbox sent; Kafka knows no states.
            knowing = [(self._any_sender, False), *([] if self.servers.kafka_url else [(self.servers.queue, True)])]
            for server, of_outbox in knowing:
                sent_there = [half for half in halves if (half.mode == "outbox") == of_outbox]
                states = {half.transaction_id: half.state for half in sent_there}
                history.opposite += self._opposite(name, server.url, states)
        for path in sorted(self.directory.glob("*.notes")):
            for kind, *words in read_notes(path):
                if kind == "told" and len(words) == 2:
                    history.answers[words[0]] = words[1]
                elif kind == "refused" and len(words) == 2:
                    history.refused_for_good.setdefault(words[0], set()).add(words[1])
        return history

    def _opposite(self, source: str, url: str, halves: Mapping[str, str]) -> list[str]:
        """Transactions whose outcome on a server is the opposite of the database's (`halves`: states by id)."""
        wrong = []
        ids = list(halves)
        for first in range(0, len(ids), 1000):
            request = {"producer_group": source, "ids": ids[first : first + 1000]}
            status, answer = ask(url, "POST", "/v1/transactions/states", request)
            assert status == 200, answer
            for item in answer["items"]:
                wanted = "ROLLED_BACK" if halves[item["id"]] == "ROLLED_BACK" else "COMMITTED"
                said = item.get("state", "unknown")
                if said != wanted and not (said == "unknown" and wanted == "ROLLED_BACK"):
                    wrong.append(f"{item['id']} is {wanted} in {source}, and {said} at the server")
        return wrong
