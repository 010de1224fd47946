"""LEFT_OUT where servers store in a database: a relay or bridge fills the queues, and people move groups there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notify.movers.relay.relay import Relay
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs, Plan
from notify.spark.watch.watching import Auditing, Watch
from notify.storage.sql.engines import opened
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.leaving import told
from tests.audit.repairing import in_queue
from tests.audit.shop import TOPIC, Shop
from tests.support.bridges import move
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import Caller, subscribe
from tests.support.http import ask
from tests.support.receiver import Receiver
from tests.support.servers import make_storage, stop_if_running

MOVED, STEADY = "points", "mails"
WHY = "a typo in the topic"
HOUR_US = 3_600_000_000


class Cluster:
    """A server over a database, and a queue server whose registry is there; `with` stops them."""

    def __init__(self, storage_url: str, shop_url: str, directory: Path) -> None:
        make_storage(storage_url)
        self.storage_url = storage_url
        flags = ["--registry", storage_url, "--roles", "queue"]
        self.queue = ServerProcess(directory / "queue", flags=flags).start()
        self.sender = ServerProcess(directory / "sender", flags=["--storage", storage_url]).start()
        self.shop = Shop(shop_url, self.sender.url)
        self.callers = {group: Caller(self.queue.url, group, "i") for group in (MOVED, STEADY)}
        for group in self.callers:
            subscribe(self.queue.url, group, TOPIC, start="earliest")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shop.close()
        stop_if_running(self.sender)
        stop_if_running(self.queue)

    def order(self, count: int, *groups: str) -> set[str]:
        """Place orders, move their messages to the queue, and let these groups settle them; the messages' ids."""
        before = self.shop.transactions()
        for _ in range(count):
            self.shop.order()
        names = {f"{name}.0" for name in self.shop.transactions() - before}
        eventually(lambda: self._moved() == len(before) + count, "the messages to be moved")
        for group in groups:
            messages: list[dict[str, Any]] = []
            eventually(lambda g=group, m=messages: m.extend(self.callers[g].receive(TOPIC)) or len(m) == count, group)  # type: ignore[misc]
            assert {message["id"] for message in messages} == names
            assert set(self.callers[group].settle(messages)) == {200}
        return names

    def _moved(self) -> int:
        if self.storage_url.startswith("mysql"):
            move(self.storage_url, self.queue)
        else:
            with opened(self.storage_url) as engine:
                asyncio.run(Relay(engine, self.queue.url).run(once=True))
        return in_queue(self.queue)

    @contextlib.contextmanager
    def inputs(self) -> Iterator[Inputs]:
        with (
            contextlib.closing(Database(self.shop.url, "shop")) as shop,
            contextlib.closing(Database(self.storage_url, "servers")) as storage,
        ):
            yield Inputs([shop], [LogInput(self.queue.data_dir, "queue")], storages=[storage])


@pytest.fixture(params=["postgresql", pytest.param("mysql", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[Cluster]:
    with (
        empty_database(request.param, database_urls, tmp_path) as storage_url,
        empty_database(request.param, database_urls, tmp_path) as shop_url,
        Cluster(storage_url, shop_url, tmp_path) as cluster,
    ):
        yield cluster


@pytest.mark.long
def test_a_reset_at_the_queue_server_is_told_with_who_and_why(spark: Any, cluster: Cluster, tmp_path: Path) -> None:
    """The record is in the servers' database, and so is the half of each message."""
    begun_us = time.time_ns() // 1000
    cluster.order(2, MOVED, STEADY)
    skipped = cluster.order(3, STEADY)
    body = {"topic": TOPIC, "to": "latest", "reason": WHY}
    status, answer = ask(
        cluster.queue.url, "POST", f"/v1/admin/groups/{MOVED}/reset", body, headers={"x-notify-user": "ann"}
    )
    assert status == 200, answer
    later = cluster.order(1, MOVED, STEADY)
    with cluster.inputs() as inputs:
        wait_until_closed(inputs.databases[0], AT_ONCE)
    with cluster.inputs() as inputs:
        result = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
        assert (result.verdict, result.exit_code, result.reasons) == ("PASS", 0, [])
        assert {f.message_id for f in result.found if f.finding == "LEFT_OUT"} == skipped
        assert told(result.left_out) == {(MOVED, "reset"): (len(skipped), "ann", WHY)}
        done = result.completeness
        assert done is not None and done.due == 6 and done.delivered <= 3  # within a second
        failing = Audit(spark, replace(AT_ONCE, fail_on=("LEFT_OUT",)), inputs, tmp_path / "scratch").run()
        assert (failing.verdict, failing.exit_code) == ("FINDINGS", 1)
        known = explain(inputs, min(skipped), tmp_path / "scratch", (1, 1))
        assert f"LEFT_OUT: {MOVED} never settled it" in known.sentence and f"by ann: {WHY}" in known.sentence
        assert "LEFT_OUT" not in explain(inputs, min(later), tmp_path / "scratch", (1, 1)).sentence

    # A watch says it, and alarms, where it is told to.
    for fail_on, wanted in (((), set()), (("LEFT_OUT",), {f"LEFT_OUT:{name}:{MOVED}" for name in skipped})):
        said: list[dict[str, Any]] = []
        state = tmp_path / f"state-{len(fail_on)}"
        with contextlib.closing(Receiver()) as receiver:
            watch = Watch(
                Auditing(spark, cluster.inputs, state / "segments"), Plan(begun_us, 0, 1, 1, fail_on=fail_on), state,
                window_seconds=3600, emit=said.append, alarm_url=receiver.url,
                clock=lambda: (begun_us + 3 * HOUR_US) / 1e6,
            )  # fmt: skip
            with contextlib.closing(watch):
                watch.run(threading.Event(), 1)
            alarmed = {body["key"] for body in receiver.taken if body["kind"] == "finding"}
            assert alarmed == wanted, receiver.taken  # the window ends later than the inputs
        assert [line["verdict"] for line in said if line["kind"] == "window"] == ["FINDINGS" if wanted else "PASS"]
        assert {line["key"] for line in said if line["kind"] == "finding"} == wanted
        assert all(f"by ann: {WHY}" in line["detail"] for line in said if line["kind"] == "finding")
