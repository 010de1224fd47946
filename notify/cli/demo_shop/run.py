"""One run of the demo, from an empty directory to the verdict."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.cli.demo_shop.books import Books
from notify.cli.demo_shop.children import Children
from notify.cli.demo_shop.conductor import SECONDS, Conductor
from notify.cli.demo_shop.proof import DemoFailed, Proof
from notify.cli.demo_shop.shop import GROUP
from notify.cli.demo_shop.topology import Embedded, Topology
from notify.errors import NotifyError

PAUSE_SECONDS = 0.004
"""How long a customer waits between two orders."""


class Demo:
    """One run. `report` is called a few times a second with the proof so far and the current step."""

    def __init__(
        self,
        dsn: str | None,
        seconds: float = SECONDS,
        seed: int | None = None,
        report: Callable[[Proof, str], None] = lambda *_: None,
        topology: Callable[[Path, ExitStack], Topology] = Embedded,
        audit: Path | None = None,
    ) -> None:
        """`dsn`: the shop's database; None: SQLite files. `topology` starts the servers. `audit`: the directory for the
        report of the audit; None: no audit."""
        self._dsn = dsn
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._report = report
        self._topology = topology
        self._audit = audit
        self._proof = Proof()

    def run(self) -> Proof:
        """Run the shop, kill its processes and servers, wait until all orders have their effects, and count.

        A failed run keeps its files. Raises NotifyError if the database cannot be used.
        """
        began = time.monotonic()
        proof = self._proof
        directory = Path(tempfile.mkdtemp(prefix="notify-demo-"))
        shop = self._dsn or f"sqlite:///{directory}/shop.db"
        effects = self._dsn or f"sqlite:///{directory}/points.db"
        try:
            with contextlib.closing(Books(shop, effects)) as books:
                try:
                    with ExitStack() as stack:
                        self._run_shop(directory, stack, books, shop, effects)
                except (DemoFailed, NotifyError, OSError, subprocess.SubprocessError, sa.exc.SQLAlchemyError) as error:
                    proof.failure = _one_line(error)
            proof.seconds = time.monotonic() - began
            if not proof.ok:
                proof.directory = str(directory)
        finally:
            if not proof.directory:
                shutil.rmtree(directory, ignore_errors=True)
        return proof

    def _run_shop(self, directory: Path, stack: ExitStack, books: Books, shop: str, effects: str) -> None:
        self._report(self._proof, "starting")
        topology = self._topology(directory, stack)
        order = {"url": topology.producer_url, "dsn": shop, "pause": PAUSE_SECONDS}
        specs: dict[str, tuple[str, dict[str, Any]]] = {
            "producer 1": ("orders", order),
            "producer 2": ("orders", order),
            "consumer": ("points", {"url": topology.consumer_url, "dsn": effects}),
        }
        children = Children(directory, specs)
        stack.callback(children.end)
        conductor = Conductor(children, topology, books, self._proof, self._report, self._chance, self._seconds)
        try:
            conductor.run()
            books.prove(self._proof, children.attempts)
            self._proof.redelivered = topology.redelivered()
            if self._audit is not None:
                self._report(self._proof, "Spark compares both databases with the queues")
                self._proof.audit = audited(topology, shop, effects, self._audit)
        finally:
            self._proof.stderr = children.last_words() | topology.last_words()


def _one_line(error: Exception) -> str:
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


AUDIT_SECONDS = 1800.0


def audited(topology: Topology, shop: str, effects: str, report: Path) -> dict[str, Any]:
    """Run the audit, write its report to the directory `report`, and return its result.

    Raises NotifyError if the audit cannot run.
    """
    databases = {"shop": shop} | ({"points": effects} if effects != shop else {})
    owner = "points" if "points" in databases else "shop"
    command = [sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", *topology.audit_flags()]
    command += [flag for name, url in databases.items() for flag in ("--database", f"{name}={url}")]
    command += ["--effects", f"{owner}:SELECT message_id, '{GROUP}' AS consumer_group FROM points"]
    # The shop has been idle for a while, so no transaction is still running.
    command += ["--max-transaction-seconds", "2", "--deliver-seconds", "2", "--bucket-seconds", "1"]
    command += ["--report", str(report)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=AUDIT_SECONDS)
    try:
        result: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        last_line = "".join(process.stderr.strip().splitlines()[-1:])
        raise NotifyError(f"the audit could not run: {last_line}") from None
    return result
