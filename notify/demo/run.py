"""The demo's conductor: starts the shop's processes, kills them at random moments, waits, and proves the result."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.demo.shop import GROUP, Points, ShopOrder, make_tables, open_engine
from notify.demo.topology import Embedded, Topology
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
    audit: dict[str, Any] | None = None
    """What `notify audit` said of it, where it was asked."""

    @property
    def ok(self) -> bool:
        return (
            self.committed > 0
            and self.effects == self.committed == self.exactly_once
            and not (self.missing or self.doubled or self.ghosts or self.undecided)
            and (self.audit is None or self.audit.get("verdict") == "PASS")
        )


class Demo:
    """One run. `report` is called a few times a second with what is known so far."""

    def __init__(
        self,
        dsn: str | None,
        seconds: float,
        seed: int | None,
        report: Callable[[Proof, str], None],
        topology: Callable[[Path, ExitStack], Topology] = Embedded,
        audit: Path | None = None,
    ) -> None:
        """`dsn`: the shop's database, default SQLite files; `topology` starts what the shop runs on; `audit`: where
        the report of an audit goes, None for no audit."""
        self._dsn = dsn
        self._topology = topology
        self._audit_to = audit
        self._seconds = seconds
        self._random = random.Random(seed)
        self._report = report
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._specs: dict[str, tuple[str, dict[str, Any]]] = {}
        self._doubtful: dict[str, str] = {}
        self.proof = Proof(killed={"producer": 0, "consumer": 0})

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
            server = self._topology(directory, stack)
            self.proof.killed |= dict.fromkeys(server.parts(), 0)
            stack.callback(self._stop_all)
            spec = {
                "url": server.producer_url,
                "dsn": shop,
                "attempts": str(directory / "attempts"),
                "stop": str(directory / "stop"),
                "pause": 0.004,
            }
            self._specs = {
                "producer 1": ("orders", spec),
                "producer 2": ("orders", spec),
                "consumer": ("points", {"url": server.consumer_url, "dsn": effects}),
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
            if self._audit_to is not None:
                self._report(self.proof, "Spark reconciles both databases with what was delivered")
                self.proof.audit = _audited(server, shop, effects, self._audit_to)
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

    def _trouble(self, server: Topology, engines: tuple[sa.Engine, sa.Engine]) -> None:
        """Kill producers again and again, the consumer now and then, each part of what they run on once."""
        until = time.monotonic() + self._seconds
        parts = server.parts()
        deaths = {
            part: time.monotonic() + self._seconds * (self._random.uniform(0.1, 0.7) + n) / len(parts)
            for n, part in enumerate(parts)
        }
        next_kill = {name: time.monotonic() + self._random.uniform(1.5, 3.0) for name in self._specs}
        while (now := time.monotonic()) < until:
            for name, at in next_kill.items():
                if now >= at:
                    self._kill(name)
                    self._start(name)
                    next_kill[name] = now + self._random.uniform(1.2, 2.6) * (1.5 if name == "consumer" else 1)
            for part in [part for part, at in deaths.items() if now >= at]:
                del deaths[part]
                self._report(self.proof, f"the {part} is killed, and starts again")
                server.kill(part)
                self.proof.killed[part] += 1
            self._observe(server, engines)
            self._report(self.proof, "placing orders while processes are killed")
            time.sleep(0.1)

    def _settle(self, server: Topology, engines: tuple[sa.Engine, sa.Engine]) -> None:
        """No new orders, no more kills: wait until nothing is undecided and every message is settled."""
        until = time.monotonic() + SETTLE_SECONDS
        calm = 0
        while time.monotonic() < until and calm < 5:
            self._observe(server, engines)
            self._report(self.proof, "waiting for check-back and delivery to finish")
            calm = (
                calm + 1
                if self.proof.undecided == 0 and server.lag(self.proof.committed - self.proof.effects) == 0
                else 0
            )
            time.sleep(0.2)

    def _observe(self, server: Topology, engines: tuple[sa.Engine, sa.Engine]) -> None:
        shop, effects = engines
        with shop.connect() as connection:
            self.proof.committed = connection.scalar(sa.select(sa.func.count()).select_from(ShopOrder)) or 0
        with effects.connect() as connection:
            self.proof.effects = connection.scalar(sa.select(sa.func.count()).select_from(Points)) or 0
        rows = server.undecided()
        self.proof.undecided = len(rows)
        for row in rows:
            # An outcome follows its commit within milliseconds: what is older than this has lost it.
            if row["age"] > 1.0:
                self._doubtful.setdefault(row["id"], row["instance"])

    # --- proof ------------------------------------------------------------------------------------------------

    def _prove(self, server: Topology, engines: tuple[sa.Engine, sa.Engine], attempts: Path) -> None:
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
            state = server.state(transaction_id)
            proof.in_doubt[state] = proof.in_doubt.get(state, 0) + 1
        proof.redelivered = server.redelivered()


def _audited(server: Topology, shop: str, effects: str, to: Path) -> dict[str, Any]:
    """`notify audit run --json` on what the demo did. Raises NotifyError where it could not run."""
    databases = {"shop": shop} | ({"points": effects} if effects != shop else {})
    where = "points" if "points" in databases else "shop"
    command = [sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", *server.audit_flags()]
    command += [flag for name, url in databases.items() for flag in ("--database", f"{name}={url}")]
    command += ["--effects", f"{where}:SELECT message_id, '{GROUP}' AS consumer_group FROM points"]
    # The shop has been quiet for a while: nothing of it is on its way any more.
    command += ["--max-transaction-seconds", "2", "--deliver-seconds", "2", "--bucket-seconds", "1"]
    command += ["--report", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise NotifyError(f"the audit could not run: {done.stderr.strip().splitlines()[-1:]}") from None
    return found
