"""Windows one after the other: nothing is said twice or left out, however the watch ends; what comes late is revised.

`make audit-watch` does the same beside a running shop with real kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify import ids
from notify.client.table import half_message
from notify.errors import Unavailable
from spark.databases import Database
from spark.log_input import LogInput
from spark.result import Inputs, Plan
from spark.watch import RECHECKS, Watch
from storage.log.store import LogStore
from storage.sql.rows import moment_of
from storage.store import NewMessage, NewTransaction, SettleKind
from tests.audit.campaign import made_run
from tests.audit.made import CONSUMERS, PRODUCERS, Made, payload_of, transaction_id
from tests.audit.plant import copied
from tests.support.shop import make_engine

COUNT = 25_000  # two and a half seconds' worth


class Killed(BaseException):
    """Stands for the end of the process."""


class Run:
    """A run with one lost transaction in two of its seconds, and watches over it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"sqlite:///{directory}/shop.db"
        made = made_run(directory, self.url, COUNT)
        self.made = Made(copied(made.log, directory / "copy"), COUNT, made.first_us)
        self.begin_us = self.made.first_us // 1_000_000 * 1_000_000
        self.lost = [self.made.at(n) for n in (12_000, 22_000)]
        engine = make_engine(self.url)
        with engine.begin() as connection:
            for at in self.lost:
                row = {
                    "transaction_id": self.name(at), "message_no": 0, "producer_group": PRODUCERS, "mode": "half",
                    "state": "COMMITTED", "shards": "", "topic": "order.1", "relayed": 1, "created_at": moment_of(at),
                }  # fmt: skip
                connection.execute(half_message.insert().values(**row))
        engine.dispose()

    def name(self, at_us: int) -> str:
        return ids.to_text(transaction_id(COUNT + 1, at_us))

    @contextlib.contextmanager
    def inputs(self) -> Iterator[Inputs]:
        with contextlib.closing(Database(self.url, "shop")) as database:
            yield Inputs([database], [LogInput(self.made.log)])

    def watch(self, spark: Any, state: Path, said: list[dict[str, Any]], **options: Any) -> Watch:
        plan = Plan(self.begin_us, 0, 1, 1)
        return Watch(
            spark, plan, options.pop("inputs", self.inputs), state, window_seconds=1, emit=said.append, **options
        )

    def arrive(self, at_us: int) -> None:
        """What was lost comes after all, and is delivered."""

        async def late() -> None:
            store = LogStore(self.made.log)
            await store.open(at_us)
            offset = store.bounds("order.1", 0)[1]
            name = ids.from_text(self.name(at_us))
            message = NewMessage("order.1", payload_of(1), "k1")
            await store.put([NewTransaction(name, PRODUCERS, [message], committed=True)], at_us)
            await store.settle(CONSUMERS, "order.1", 0, [(offset, 1)], SettleKind.FILTERED, at_us)
            await store.close()

        asyncio.run(late())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("watched"))


def lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "findings.jsonl").read_text().splitlines()]


def test_a_watch_that_is_killed_anywhere_says_everything_once(
    spark: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    # Before its lines are durable, after they are, and in the middle of one.
    deaths = [("_say", True), ("_save", True), ("_save", False)]
    state = tmp_path / "state"
    for step, (where, before) in enumerate(deaths):
        watch = run.watch(spark, state, said)
        original = getattr(watch, where)

        def dies(*arguments: Any, original: Any = original, before: bool = before) -> None:
            if not before:
                original(*arguments)
            raise Killed

        monkeypatch.setattr(watch, where, dies)
        with pytest.raises(Killed):
            watch.run(threading.Event(), 3)
        if step == 1:
            with (state / "findings.jsonl").open("a") as file:
                file.write('{"kind": "finding", "key": "LOST:cut sho')
    run.watch(spark, state, said).run(threading.Event(), 3)
    found = [line for line in lines(state) if line["kind"] == "finding"]
    assert Counter(f["message_id"] for f in found) == Counter(f"{run.name(at)}.0" for at in run.lost)
    assert {f["finding"] for f in found} == {"LOST"}
    windows = [line["window_us"] for line in said if line["kind"] == "window"]
    assert windows == sorted(set(windows)) and windows[0] - run.begin_us in (0, 1_000_000)


def test_an_input_that_is_away_holds_the_window_up(spark: Any, run: Run, tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    away = [True, True, False]

    @contextlib.contextmanager
    def inputs() -> Iterator[Inputs]:
        if away and away.pop(0):
            raise Unavailable("the database is away")
        with run.inputs() as found:
            yield found

    watch = run.watch(spark, tmp_path / "state", said, inputs=inputs)
    stop = threading.Event()
    stop.wait = lambda timeout=None: False  # type: ignore[method-assign]
    watch.run(stop, 1)
    assert [line["kind"] for line in said] == ["failure", "failure", "window"]
    assert said[-1]["window_us"] == run.begin_us


def test_what_comes_late_is_revised(spark: Any, run: Run, tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    watch = run.watch(spark, tmp_path / "state", said)
    watch.run(threading.Event(), 2)
    assert [line["finding"] for line in said if line["kind"] == "finding"] == ["LOST"]
    run.arrive(run.lost[0])
    run.watch(spark, tmp_path / "state", said).run(threading.Event(), RECHECKS[0])
    revised = [line for line in said if line["kind"] == "revision"]
    assert [(line["finding"], line["key"]) for line in revised] == [("LOST", f"LOST:{run.name(run.lost[0])}.0:")]
