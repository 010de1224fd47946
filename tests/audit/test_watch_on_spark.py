"""A watch with real audits on Spark: what comes late is revised, and what goes wrong late is found."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.client.tables.definitions import half_message, notify_inbox
from notify.object_store.store import Store
from notify.protocol import ids
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs, Plan
from notify.spark.tables.reading import files_of, read_file
from notify.spark.watch.looks import SOON
from notify.spark.watch.watching import Auditing, Watch
from notify.storage.groups import SettleKind
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.sql.rows import moment_of
from tests.support.shop import make_engine
from tools.bench.made_run import CONSUMERS, PRODUCERS, Made, made_run, payload_of, transaction_id


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

    def forget(self) -> str:
        """Delete the effect of a message of the first window; the message's id."""
        name = f"{ids.to_text(self.made.id(40))}.0"
        engine = make_engine(self.url)
        with engine.begin() as connection:
            deleted = connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id == name))
        engine.dispose()
        assert deleted.rowcount == 1
        return name

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


@pytest.mark.long
def test_late_records_revise_findings_and_late_faults_are_found(spark: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    said: list[dict[str, Any]] = []
    results = f"file://{tmp_path}/results"

    def watch() -> Watch:
        audit = Auditing(spark, run.inputs, tmp_path / "state" / "segments", results)
        plan = Plan(run.made.first_us, 0, 1, 1)
        return Watch(audit, plan, tmp_path / "state", window_seconds=1, emit=said.append)

    with contextlib.closing(watch()) as first:
        first.run(threading.Event(), 1)
    key = f"LOST:{ids.to_text(run.id)}.0:"
    assert [(line["kind"], line.get("key")) for line in said] == [("finding", key), ("window", None)]
    committed = said[-1]["committed"]
    run.arrive()
    gone = run.forget()
    said.clear()
    with contextlib.closing(watch()) as second:
        second.run(threading.Event(), SOON.behind + SOON.at_once - 1)
    assert [(line["kind"], line.get("key")) for line in said if line["kind"] != "window"] == [
        ("finding", f"ACKED_NO_EFFECT:{gone}:{CONSUMERS}"), ("revision", key),
    ]  # fmt: skip
    assert [line["committed"] for line in said if line["kind"] == "window"] == [100, 100, 0]
    rows = [row for file in files_of(results, "findings") for row in read_file(Store(results), file).to_pylist()]
    assert {row["finding"]: row["resolved_us"] is None for row in rows} == {"LOST": False, "ACKED_NO_EFFECT": True}
    buckets = [row for file in files_of(results, "buckets") for row in read_file(Store(results), file).to_pylist()]
    assert sum(row["committed"] for row in buckets) == committed + 200
