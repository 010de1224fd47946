"""The stage of a history: databases, servers, bridges and relays, producers and consumers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from notify.errors import NotifyError
from notify.testing.process import ServerProcess
from tests.history.administration import admin
from tests.history.processes import Actor, Supervisor
from tests.history.room import Room
from tests.history.scene import Scene
from tests.history.tables import make_tables
from tests.history.takers import BATCH, TAKERS, TAKERS_OF_KAFKA, Taker
from tests.support.clock import eventually
from tests.support.groups import is_subscribed

HELD_LAG, HELD_LAG_OF_KAFKA = 50_000, 10_000
"""The most messages that a group may be behind; beyond it callers wait until the group catches up."""


class Stage:
    """All processes of a history."""

    def __init__(self, directory: Path, room: Room, scene: Scene) -> None:
        self.directory = directory
        self.room = room
        self.scene = scene
        self.sources = scene.sources
        self.servers = scene.servers(room.directory)
        takers = TAKERS_OF_KAFKA if scene.kafka else TAKERS
        self.takers = [taker for taker in takers if not scene.groups or taker.group in scene.groups]
        self.actors: dict[str, Actor] = {}
        self.movers: list[str] = []
        """The bridges and relays among them."""
        self.guests: dict[str, Actor] = {}
        """Further instances of groups, which join and leave."""
        self.supervisor = Supervisor(self.actors | self.guests)

    @property
    def url(self) -> str:
        """The address of the server that shows and steers the groups."""
        return self.servers.queue.url

    @property
    def groups(self) -> Sequence[str]:
        """The groups that are shown; Kafka has one for each instance of a broadcast, and none for all of them."""
        return [t.group for t in self.takers if t.mode != "broadcast" or not self.scene.kafka]

    @property
    def groups_with_letters(self) -> Sequence[str]:
        """The groups whose dead letters can be sent again."""
        return [t.group for t in self.takers if t.mode != "broadcast"]

    @property
    def any_sender(self) -> ServerProcess:
        """A server that knows all transactions."""
        return next(iter(self.servers.senders.values()))

    def start(self, stack: ExitStack) -> None:
        """Start everything; the stack ends it."""
        for dsn in self.sources.values():
            make_tables(dsn)
        self.servers.start(stack)
        self._consume(stack)
        self._produce(stack)
        self.supervisor = Supervisor(self.actors | self.guests)
        self.supervisor.start()
        stack.callback(self.supervisor.stop)

    def end(self) -> None:
        """Have producers end: they answer checks until everything is settled."""
        self.supervisor.stop()
        (self.directory / "end").touch()

    def keep_output(self) -> None:
        """Write the last lines of each server to a file."""
        for name, server in self.servers.by_name.items():
            code = None if server.process is None else server.process.poll()
            (self.directory / f"{name}.log").write_text(f"{''.join(server.output)}\nexit code {code}\n")

    def _produce(self, stack: ExitStack) -> None:
        for name, dsn in self.sources.items():
            is_bridged = dsn.startswith("mysql") or (self.scene.has_wal_bridge and dsn.startswith("postgresql"))
            mover = "bridge" if is_bridged else "relay"
            self.movers.append(f"{mover} {name}")
            words = ["notify.cli.main", mover, "--dsn", dsn, "--url", self.servers.queue_url]
            self._add(f"{mover} {name}", Actor(words, self.directory / f"{mover} {name}.log"), stack)
            spec = {
                "url": self.servers.send_url,
                "source": name,
                "dsn": dsn,
                "async_dsn": dsn if dsn.startswith("postgresql+psycopg") else "",
                "callers": self.scene.callers,
                "most_delay": self.scene.most_delay,
                "pause": self.scene.pause,
                "stop": str(self.directory / "stop"),
                "hold": str(self.directory / "hold"),
                "end": str(self.directory / "end"),
            }
            self._add(f"producer {name}", self._actor(f"producer {name}", "produce", spec), stack)

    def _consume(self, stack: ExitStack) -> None:
        """Start consumers and wait until they subscribe: an instance receives no earlier broadcasts."""
        dsns = list(self.sources.values())
        for place, taker in enumerate(self.takers):
            dsn = dsns[-(place % 2)]
            for instance in taker.instances:
                name = f"consumer {taker.group}" + (f" {instance}" if instance != taker.instances[0] else "")
                self._add(name, self._actor(name, "consume", _spec(taker, instance, dsn) | self._queues), stack)
            if taker.guest:
                name = f"consumer {taker.group} guest"
                guest = self.guests[name] = self._actor(name, "consume", _spec(taker, "guest", dsn) | self._queues)
                stack.callback(guest.close)
        shown = [t.who if t.mode == "broadcast" and self.scene.kafka else t.group for t in self.takers]
        for group in shown:
            eventually(lambda group=group: is_subscribed(self.url, group), f"{group} to be subscribed")  # type: ignore[misc]

    @property
    def _queues(self) -> dict[str, str]:
        return {"url": self.servers.queue_url}

    def _actor(self, name: str, role: str, spec: dict[str, Any]) -> Actor:
        notes = self.directory / f"{name}.notes"
        words = ["tests.history.actors", role, json.dumps(spec | {"notes": str(notes)})]
        return Actor(words, self.directory / f"{name}.log", notes)

    def _add(self, name: str, actor: Actor, stack: ExitStack) -> None:
        self.actors[name] = actor
        actor.start()
        stack.callback(actor.close)

    def hold_or_not(self, *, always: bool = False) -> None:
        """Make callers wait while a group is far behind, or `always`; the server may be unreachable."""
        with contextlib.suppress(NotifyError):
            groups = admin(self.url, "GET", "groups")["groups"]
            held = self.directory / "hold"
            most = HELD_LAG_OF_KAFKA if self.scene.kafka else HELD_LAG
            if always or max((group["lag"] for group in groups), default=0) > most:
                held.touch()
            else:
                held.unlink(missing_ok=True)


def _spec(taker: Taker, instance: str, dsn: str) -> dict[str, Any]:
    is_async = taker.mode == "failover" and instance == taker.instances[0] and dsn.startswith("postgresql+psycopg")
    return {
        "who": taker.who,
        "group": taker.group,
        "mode": taker.mode,
        "topic": taker.topic,
        "tag": taker.tag,
        "batch": BATCH if instance not in taker.instances else taker.batch,
        "filter": taker.filter,
        "instance": instance,
        "dsn": dsn,
        "async_dsn": dsn if is_async else "",
    }
