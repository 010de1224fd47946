"""A watch reports every finding exactly once, however it ends, and revises findings about late messages.

Most tests use fake audits; the last one runs real audits. `make audit-watch` does the same beside a running shop with
real kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify import ids
from notify.bench.made_run import CONSUMERS, PRODUCERS, Made, made_run, payload_of, transaction_id
from notify.client.table import half_message
from notify.errors import Unavailable
from notify.spark import watch as watch_module
from notify.spark.databases import Database
from notify.spark.log_input import LogInput
from notify.spark.result import Found, Inputs, Plan, Result
from notify.spark.watch import RECHECKS, Auditing, Watch
from notify.storage.groups import SettleKind
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.sql.rows import moment_of
from tests.support.shop import make_engine

SECOND = 1_000_000
BEGIN_US = 1_700_000_000 * SECOND
WINDOWS = 4


class Killed(BaseException):
    """Stands for the death of the process."""


class Shop:
    """A shop that loses messages in the first and the third window; one of them only comes late.

    Each audit, line and sync is a step at which the watch may be killed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = {BEGIN_US: ["a.0", "b.0"], BEGIN_US + 2 * SECOND: ["c.0"]}
        self.steps = 0
        self.last_step = 0
        """The step at which the watch is killed; 0: never."""
        self.said: list[dict[str, Any]] = []
        self._latest_us = 0
        self._fsync = os.fsync
        monkeypatch.setattr(watch_module.os, "fsync", self._sync)

    def begin(self, last_step: int = 0) -> None:
        """Start again without audits and lines."""
        self.steps, self.last_step, self.said, self._latest_us = 0, last_step, [], 0

    def audit(self, plan: Plan) -> Result:
        self._step()
        assert plan.closes_by_clock and plan.to_us - plan.from_us == SECOND
        lost = self.lost.get(plan.from_us, [])
        self._latest_us = max(self._latest_us, plan.from_us)
        if self._latest_us > plan.from_us:  # audited again
            lost = [message for message in lost if message != "a.0"]
        cases = [Found("LOST", message.partition(".")[0]) for message in lost]
        return Result("FINDINGS" if cases else "PASS", found=cases, totals={"committed": 1})

    def emit(self, line: dict[str, Any]) -> None:
        self._step()
        self.said.append(line)

    def _sync(self, file: int) -> None:
        self._step()
        self._fsync(file)
        self._step()

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.last_step:
            raise Killed

    def watch(self, state: Path) -> Watch:
        return Watch(self.audit, Plan(BEGIN_US, 0, 1, 1), state, window_seconds=1, emit=self.emit)


def lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "findings.jsonl").read_text().splitlines()]


def watched_with_a_death(shop: Shop, state: Path, step: int, cut_line: bool) -> None:
    """Watch all windows, and kill the watch once."""
    shop.begin(step)
    with contextlib.suppress(Killed):
        shop.watch(state).run(threading.Event(), WINDOWS)
    if cut_line and state.exists():
        with (state / "findings.jsonl").open("a") as file:
            file.write('{"kind": "finding", "key": "LOST:cut sho')
    shop.last_step = 0
    again = shop.watch(state)
    done = (again.state.next_us - BEGIN_US) // SECOND
    if done < WINDOWS:
        again.run(threading.Event(), WINDOWS - done)


def test_a_watch_that_is_killed_anywhere_says_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    shop.watch(tmp_path / "whole").run(threading.Event(), WINDOWS)
    whole, steps = shop.said, shop.steps
    assert [line["kind"] for line in whole] == ["finding", "finding", "window", "window", "finding", "revision",
                                                "window", "window"]  # fmt: skip
    for step in range(1, steps + 1):
        for cut_line in (False, True):
            state = tmp_path / f"{step}-{cut_line}"
            watched_with_a_death(shop, state, step, cut_line)
            kept = Counter((line["kind"], line["key"]) for line in lines(state))
            assert kept == Counter((line["kind"], line["key"]) for line in lines(tmp_path / "whole")), step
            # An emitted line is not emitted again; the line at which the watch died is only in the file.
            emitted = Counter((line["kind"], line["window_us"], line.get("key")) for line in shop.said)
            missing = Counter((line["kind"], line["window_us"], line.get("key")) for line in whole) - emitted
            assert max(emitted.values()) == 1 and missing.total() <= 3, (step, missing)


class Hurried(threading.Event):
    """A stop event that does not wait for an input to come back."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_an_input_that_is_away_holds_the_window_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    away = [True, True, False]

    def audit(plan: Plan) -> Result:
        if away.pop(0):
            raise Unavailable("the database is away")
        return shop.audit(plan)

    watch = Watch(audit, Plan(BEGIN_US + SECOND, 0, 1, 1), tmp_path / "state", window_seconds=1, emit=shop.emit)
    watch.run(Hurried(), 1)
    assert [line["kind"] for line in shop.said] == ["failure", "failure", "window"]
    assert shop.said[-1]["window_us"] == BEGIN_US + SECOND


# --- with real audits -----------------------------------------------------------------------------------------------


class Run:
    """A run over three windows of a second, with a transaction lost in the first."""

    def __init__(self, directory: Path) -> None:
        self.url = f"sqlite:///{directory}/shop.db"
        self.made: Made = made_run(directory, self.url, 300, step_us=10_000)
        self.at_us = self.made.at(30)
        self.id = transaction_id(self.made.count + 1, self.at_us)
        engine = make_engine(self.url)
        with engine.begin() as connection:
            row = {
                "transaction_id": ids.to_text(self.id), "message_no": 0, "producer_group": PRODUCERS, "mode": "half",
                "state": "COMMITTED", "shards": "", "topic": "order.1", "relayed": 1,
                "created_at": moment_of(self.at_us),
            }  # fmt: skip
            connection.execute(half_message.insert().values(**row))
        engine.dispose()

    @contextlib.contextmanager
    def inputs(self) -> Iterator[Inputs]:
        with contextlib.closing(Database(self.url, "shop")) as database:
            yield Inputs([database], [LogInput(self.made.log)])

    def arrive(self) -> None:
        """Deliver the lost message late."""

        async def late() -> None:
            store = LogStore(self.made.log)
            await store.open(self.at_us)
            offset = store.bounds("order.1", 0)[1]
            message = NewMessage("order.1", payload_of(1), "k1")
            await store.put([NewTransaction(self.id, PRODUCERS, [message], committed=True)], self.at_us)
            await store.settle(CONSUMERS, "order.1", 0, [(offset, 1)], SettleKind.FILTERED, self.at_us)
            await store.close()

        asyncio.run(late())


def test_what_comes_late_is_revised(spark: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    said: list[dict[str, Any]] = []

    def watch() -> Watch:
        audit = Auditing(spark, run.inputs, tmp_path / "state" / "segments")
        plan = Plan(run.made.first_us, 0, 1, 1)
        return Watch(audit, plan, tmp_path / "state", window_seconds=1, emit=said.append)

    watch().run(threading.Event(), 1)
    key = f"LOST:{ids.to_text(run.id)}.0:"
    assert [(line["kind"], line.get("key")) for line in said] == [("finding", key), ("window", None)]
    run.arrive()
    said.clear()
    watch().run(threading.Event(), RECHECKS[0])
    assert [(line["kind"], line.get("key")) for line in said] == [("window", None), ("revision", key), ("window", None)]
    assert [line["committed"] for line in said if line["kind"] == "window"] == [100, 100]
