"""The demo's conductor: starts the shop's processes, kills them at random moments, waits, and proves the result."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.bench.server import ServerProcess
from notify.demo.shop import GROUP, Points, ShopOrder, make_tables, open_engine
from notify.errors import NotifyError

SETTLE_SECONDS = 40.0


@dataclass(slots=True)
class Proof:
    """What the databases say. `ok` is the verdict; every count is computed, none is assumed."""

    attempts: int = 0
    committed: int = 0
    not_committed: int = 0
    effects: int = 0
    exactly_once: int = 0
    missing: int = 0
    doubled: int = 0
    ghosts: int = 0
    undecided: int = 0
    killed: dict[str, int] = field(default_factory=dict)
    in_doubt: dict[str, int] = field(default_factory=dict)
    redelivered: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return (
            self.committed > 0
            and self.effects == self.committed == self.exactly_once
            and not (self.missing or self.doubled or self.ghosts or self.undecided)
        )


class Demo:
    """One run. `report` is called a few times a second with what is known so far."""

    def __init__(self, dsn: str | None, seconds: float, seed: int | None, report: Callable[[Proof, str], None]) -> None:
        self._dsn = dsn
        self._seconds = seconds
        self._random = random.Random(seed)
        self._report = report
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._specs: dict[str, tuple[str, dict[str, Any]]] = {}
        self._doubtful: dict[str, str] = {}
        self.proof = Proof(killed={"producer": 0, "consumer": 0, "server": 0})

    def run(self) -> Proof:
        """Run the shop, kill its parts, wait until it settles, and prove. Raises NotifyError if it cannot start."""
        began = time.monotonic()
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-demo-")))
            shop = self._dsn or f"sqlite:///{directory}/shop.db"
            effects = self._dsn or f"sqlite:///{directory}/points.db"
            for dsn in (shop, effects):
                make_tables(dsn)
            self._refuse_leftovers(shop)
            server = ServerProcess(directory / "data", environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "1"}).start()
            stack.callback(server.stop)
            stack.callback(self._stop_all)
            spec = {
                "url": server.url,
                "dsn": shop,
                "attempts": str(directory / "attempts"),
                "stop": str(directory / "stop"),
                "pause": 0.004,
            }
            self._specs = {
                "producer 1": ("orders", spec),
                "producer 2": ("orders", spec),
                "consumer": ("points", {"url": server.url, "dsn": effects}),
            }
            for name in self._specs:
                self._start(name)
            engines = (open_engine(shop), open_engine(effects))
            for engine in engines:
                stack.callback(engine.dispose)
            self._trouble(server, engines)
            (directory / "stop").touch()
            self._settle(server, engines)
            self._prove(server, engines, directory / "attempts")
        self.proof.seconds = time.monotonic() - began
        return self.proof

    def _refuse_leftovers(self, dsn: str) -> None:
        engine = open_engine(dsn)
        with engine.connect() as connection:
            rows = connection.scalar(sa.select(sa.func.count()).select_from(ShopOrder))
        engine.dispose()
        if rows:
            raise NotifyError("the database holds an earlier demo's orders; give the demo an empty one")

    # --- processes --------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        role, spec = self._specs[name]
        command = [sys.executable, "-m", "notify.demo.shop", role, json.dumps(spec)]
        self._children[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _kill(self, name: str) -> None:
        child = self._children[name]
        child.send_signal(signal.SIGKILL)
        child.wait()
        self.proof.killed[name.partition(" ")[0]] += 1

    def _stop_all(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
                child.wait()

    # --- acts -------------------------------------------------------------------------------------------------

    def _trouble(self, server: ServerProcess, engines: tuple[sa.Engine, sa.Engine]) -> None:
        """Kill producers again and again, the consumer now and then, the server once."""
        until = time.monotonic() + self._seconds
        server_dies = time.monotonic() + self._seconds * self._random.uniform(0.4, 0.6)
        next_kill = {name: time.monotonic() + self._random.uniform(1.5, 3.0) for name in self._specs}
        while (now := time.monotonic()) < until:
            for name, at in next_kill.items():
                if now >= at:
                    self._kill(name)
                    self._start(name)
                    next_kill[name] = now + self._random.uniform(1.2, 2.6) * (1.5 if name == "consumer" else 1)
            if server_dies and now >= server_dies:
                server_dies = 0.0
                server.kill()
                self.proof.killed["server"] += 1
                self._report(self.proof, "the server was killed and is starting again")
                server.start()
            self._observe(server, engines)
            self._report(self.proof, "placing orders while processes are killed")
            time.sleep(0.1)

    def _settle(self, server: ServerProcess, engines: tuple[sa.Engine, sa.Engine]) -> None:
        """No new orders, no more kills: wait until nothing is undecided and every message is settled."""
        until = time.monotonic() + SETTLE_SECONDS
        calm = 0
        while time.monotonic() < until and calm < 5:
            self._observe(server, engines)
            self._report(self.proof, "waiting for check-back and delivery to finish")
            calm = calm + 1 if self.proof.undecided == 0 and self._lag(server) == 0 else 0
            time.sleep(0.2)

    def _observe(self, server: ServerProcess, engines: tuple[sa.Engine, sa.Engine]) -> None:
        shop, effects = engines
        with shop.connect() as connection:
            self.proof.committed = connection.scalar(sa.select(sa.func.count()).select_from(ShopOrder)) or 0
        with effects.connect() as connection:
            self.proof.effects = connection.scalar(sa.select(sa.func.count()).select_from(Points)) or 0
        rows = _get(server.url, "/v1/admin/transactions?max=10000")["transactions"]
        self.proof.undecided = len(rows)
        for row in rows:
            # An outcome follows its commit within milliseconds: what is older than this has lost it.
            if row["age"] > 1.0:
                self._doubtful.setdefault(row["id"], row["instance"])

    def _lag(self, server: ServerProcess) -> int:
        groups = _get(server.url, "/v1/admin/groups")["groups"]
        return sum(group["lag"] for group in groups if group["name"] == GROUP)

    # --- proof ------------------------------------------------------------------------------------------------

    def _prove(self, server: ServerProcess, engines: tuple[sa.Engine, sa.Engine], attempts: Path) -> None:
        proof = self.proof
        tried = set(attempts.read_text().split())
        with engines[0].connect() as connection:
            orders = set(connection.scalars(sa.select(ShopOrder.number)))
        with engines[1].connect() as connection:
            rows = connection.execute(sa.select(Points.order_number, sa.func.count()).group_by(Points.order_number))
            effects: dict[str, int] = dict(rows.tuples().all())
        proof.attempts = len(tried)
        proof.committed = len(orders)
        proof.not_committed = len(tried - orders)
        proof.effects = sum(effects.values())
        proof.exactly_once = sum(1 for number in orders if effects.get(number) == 1)
        proof.missing = len(orders - effects.keys())
        proof.doubled = sum(1 for count in effects.values() if count > 1)
        proof.ghosts = len(effects.keys() - orders)
        for transaction_id in self._doubtful:
            state = _get(server.url, f"/v1/admin/transactions/{transaction_id}")["state"]
            proof.in_doubt[state] = proof.in_doubt.get(state, 0) + 1
        proof.redelivered = _metric(server.url, "notify_redelivered_total")


def _get(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _metric(url: str, name: str) -> int:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return int(float(line.split()[1]))
    return 0
