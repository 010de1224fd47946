"""Repairs that are killed at random points: whatever they leave, continuing with the plan makes no effect happen twice.

A plan that stands in a file is carried out without Spark. `python -m tests.audit.killed_repair DATABASE LOG URL`
carries out the plan that each line of its input names, in a process of its own that its parent can kill. A whole run
is an audit, its plan, the plan carried out and killed again and again, and an audit that passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from pyspark.sql import SparkSession

from notify.client import Consumer, Inbox
from notify.client.tables.definitions import half_message, notify_inbox
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.journal import lines_of
from notify.spark.repair.plan import read_plan
from notify.spark.repair.planning import plan_of
from notify.spark.result import Found, Inputs, Plan, Result
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.repairing import opened, outbox_row
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.groups import lag, running
from tests.support.http import admin, post
from tests.support.transactions import new_id

NO_CHECKS = {"NOTIFY_CHECK_BACKOFF_SECONDS": "3600"}
"""A server's environment: it sends no checks, so that transactions stay in doubt."""
KILLS = 8
"""The repairs of a whole run that may be killed, before one that is not."""
WITH_EFFECTS = replace(AT_ONCE, effects=(("", "SELECT message_id FROM ledger"),))


def carry_out(database_url: str, log: str, url: str, path: Path) -> None:
    """Carry out a plan as `notify audit run --repair` does."""
    with contextlib.closing(Database(database_url, "shop")) as database:
        inputs = Inputs([database], [LogInput(Path(log))])
        repair = Repair(inputs, url, "a test", path.parent / f"scratch-{os.getpid()}")
        asyncio.run(repair.run(read_plan(path), path))


class Repairs:
    """Carries out plans in processes that it kills. Close it at the end."""

    def __init__(self, database_url: str, log: Path, url: str, seed: int = 1) -> None:
        words = [sys.executable, "-m", "tests.audit.killed_repair", database_url, str(log), url]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._chance = random.Random(seed)
        self.killed = 0

    def __enter__(self) -> Repairs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, plan: Path, within_seconds: float = 0.0) -> float:
        """Carry the plan out once, and kill that at a random instant within so many seconds (0: never); how long it
        took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        began = time.monotonic()
        self._process.stdin.write(f"{plan}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if within_seconds:
            ended, _, _ = select.select([self._process.stdout], [], [], self._chance.uniform(0, within_seconds))
            if not ended:
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
        status = int(self._process.stdout.readline())
        assert status in ({0, -signal.SIGKILL} if within_seconds else {0}), f"a repair ended with {status}"
        return time.monotonic() - began

    def run_often(self, plan: Path, times: int) -> None:
        """Carry the plan out so often, kill what runs at random instants, and then once to its end."""
        within = 1.0
        for _ in range(times):
            within = max(0.1, min(within, self.run(plan, within) * 2))
        self.run(plan)


class Ledger:
    """The business effects of a group with an inbox: a row for each time that a message took effect."""

    def __init__(self, shop: Shop, url: str) -> None:
        self._shop = shop
        self._url = url
        with shop.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE ledger (message_id varchar(64), first_id varchar(64))")
        self.consumer = Consumer(url, group="points", inbox=Inbox(shop.engine))

        @self.consumer.subscribe(TOPIC, start="earliest")
        def handle(message: Any, session: Any) -> None:
            row = {"id": message.id, "first": message.first_id}
            session.execute(sa.text("INSERT INTO ledger VALUES (:id, :first)"), row)

    def times(self) -> dict[str, int]:
        """How often each message took effect, by the id under which it was sent first."""
        with self._shop.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT first_id, count(*) FROM ledger GROUP BY first_id")
            return {str(name): int(count) for name, count in rows}

    def settled(self) -> bool:
        return lag(self._url, "points") == 0

    def unguard(self, message_ids: set[str]) -> None:
        """Delete inbox rows of effects that happened."""
        with self._shop.engine.begin() as connection:
            connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id.in_(message_ids)))

    def forget(self, message_ids: set[str]) -> None:
        """Undo effects, with their inbox rows: the messages were acknowledged, and did not take effect."""
        self.unguard(message_ids)
        with self._shop.engine.begin() as connection:
            for name in message_ids:
                connection.execute(sa.text("DELETE FROM ledger WHERE first_id = :id"), {"id": name})


def in_doubt(server: ServerProcess, shop: Shop) -> Found:
    """A half without an outcome, whose transaction committed."""
    with contextlib.closing(Database(shop.url)) as database:
        source = database.source_id()
    name = new_id()
    transaction = {"id": name, "messages": [{"topic": TOPIC, "body": "1"}], "check_after": 3600}
    request = {"producer_group": "orders", "source": source, "transactions": [transaction]}
    shard = str(post(server.url, "/v1/transactions", request)["items"][0]["shard"])
    with shop.engine.begin() as connection:
        connection.execute(half_message.insert().values(shop.row(name, shards=shard)))
    return Found("IN_DOUBT", name, evidence={"local": "COMMITTED"})


# --- whole runs -----------------------------------------------------------------------------------------------------


class WholeRuns:
    """Runs of a shop in which messages are lost, in doubt, decided wrongly and without effect."""

    def __init__(self, spark: SparkSession, server: ServerProcess, shop: Shop, directory: Path) -> None:
        self._spark = spark
        self._server = server
        self._shop = shop
        self._directory = directory
        self._ledger = Ledger(shop, server.url)
        self._unguarded: set[str] = set()
        """The messages of all runs whose effect only the ledger shows."""
        self.repaired = 0

    def run(self, rounds: int, say: Callable[[str], None] = lambda text: None) -> Iterator[str]:
        """So many whole runs, one after the other, up to one with complaints; yields what went wrong."""
        log = self._server.data_dir
        with (
            running(self._ledger.consumer, subscribed=True),
            Repairs(self._shop.url, log, self._server.url) as repairs,
        ):
            for number in range(1, rounds + 1):
                complaints = [f"run {number}: {wrong}" for wrong in self._one(number, repairs)]
                yield from complaints
                if complaints:
                    break  # the next runs would find what this one has left
                say(f"run {number}: {self.repaired} findings repaired so far, {repairs.killed} repairs killed")
            if not repairs.killed:
                yield "no repair was killed"

    def _one(self, number: int, repairs: Repairs) -> Iterator[str]:
        planted = self._plant()
        self._unguarded |= planted["UNGUARDED"]
        path = self._directory / f"run-{number}" / "plan.json"
        path.parent.mkdir()
        first = self._audited()
        if (told := _not_repaired(first)) != planted | {"UNGUARDED": self._unguarded} or first.reasons:
            yield f"planted {planted}, and found {told}: {first.reasons}"
        with opened(self._shop, self._server) as inputs:
            plan = plan_of(first, inputs, effects=WITH_EFFECTS.effects)
        wanted = set().union(*(ids for name, ids in planted.items() if name != "UNGUARDED"))
        if (items := {item.message_id for item in plan.items}) != wanted:
            yield f"the plan has {items} instead of {wanted}: {plan.held_back}"
        plan.write(path)
        repairs.run_often(path, KILLS)
        try:
            eventually(lambda: wanted <= self._ledger.times().keys() and self._ledger.settled(), "the repaired effects")
        except AssertionError:
            ended = {line["key"]: line for line in lines_of(path) if line["state"] == "ended"}
            yield f"no effect of {wanted - self._ledger.times().keys()}; the journal ends with {list(ended.values())}"
            return
        repairs.run(path)  # once more, after the effects
        eventually(self._ledger.settled, "nothing is left")
        self.repaired += len(wanted)
        if twice := {name: times for name, times in self._ledger.times().items() if times != 1}:
            yield f"took effect more than once: {twice}"
        last = self._audited()
        if (last.verdict, last.exit_code) != ("PASS", 0):
            yield f"the last audit: {last.verdict} {last.counts} {last.reasons}"

    def _plant(self) -> dict[str, set[str]]:
        """Place orders, and break some; the message ids by class."""
        before = set(self._shop.transactions())
        for _ in range(8):
            self._shop.order()
        orders = {f"{name}.0" for name in self._shop.transactions() - before}
        eventually(lambda: orders <= self._ledger.times().keys() and self._ledger.settled(), "the effects")
        ordered = sorted(orders)
        forgotten, unguarded = set(ordered[:3]), set(ordered[3:5])
        self._ledger.forget(forgotten)
        self._ledger.unguard(unguarded)
        conflict = in_doubt(self._server, self._shop)
        admin(self._server.url, "POST", f"transactions/{conflict.transaction_id}/rollback", {})
        return {
            "LOST": {outbox_row(self._shop) for _ in range(3)},
            "IN_DOUBT": {in_doubt(self._server, self._shop).message_id for _ in range(2)},
            "CONFLICT": {conflict.message_id},
            "ACKED_NO_EFFECT": forgotten,
            "UNGUARDED": unguarded,
        }

    def _audited(self, plan: Plan = WITH_EFFECTS) -> Result:
        with opened(self._shop, self._server) as inputs:
            wait_until_closed(inputs.databases[0], plan)
            return Audit(self._spark, plan, inputs, self._directory / "scratch").run()


def _not_repaired(result: Result) -> dict[str, set[str]]:
    """The message ids of each class, but for what may always happen."""
    told: dict[str, set[str]] = {}
    for case in result.found:
        if not case.evidence.get("repaired") and case.finding != "REDELIVERED":
            told.setdefault(case.finding, set()).add(case.message_id)
    return told


def whole_runs(
    spark: SparkSession, database_url: str, directory: Path, rounds: int, say: Callable[[str], None]
) -> list[str]:
    """Whole runs beside a server of their own, on an empty database (PostgreSQL); their complaints."""
    server = ServerProcess(directory / "repaired", environment=NO_CHECKS).start()
    try:
        with contextlib.closing(Shop(database_url, server.url)) as shop:
            return list(WholeRuns(spark, server, shop, directory).run(rounds, say))
    finally:
        server.stop()


def _plans() -> Iterator[Path]:
    for line in sys.stdin:
        yield Path(line.strip())


def main(database_url: str, log: str, url: str) -> None:
    for path in _plans():
        pid = os.fork()
        if not pid:
            carry_out(database_url, log, url, path)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
