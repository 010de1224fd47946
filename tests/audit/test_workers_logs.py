"""An audit of the logs of two workers, one of which was killed, and its repair through the one port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notify.errors import NotifyError
from notify.protocol.workers import worker_names
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.missing_logs import absent_shards
from notify.spark.inputs.ranges import Span
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.planning import plan_of
from notify.spark.result import Inputs, Result
from notify.storage.log.store import LogStore
from notify.storage.records import State
from notify.storage.topics import Topic
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, found, wait_until_closed
from tests.audit.repairing import in_queue, outbox_row
from tests.audit.shop import Shop
from tests.audit.trade import COUNT, TOPICS, Trade, half_of
from tests.support.clock import eventually
from tests.support.groups import lag, running
from tests.support.servers import stop_if_running

ORDERS = 14


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "data", flags=["--workers", "2"]).start()
    yield process
    stop_if_running(process)


@contextlib.contextmanager
def opened(shop: Shop, server: ServerProcess) -> Iterator[Inputs]:
    with contextlib.closing(Database(shop.url, "shop")) as database:
        yield Inputs([database], [LogInput(server.data_dir / name, name) for name in worker_names(2)])


def audited(spark: Any, shop: Shop, server: ServerProcess, scratch: Path) -> Result:
    with opened(shop, server) as inputs:
        wait_until_closed(inputs.databases[0], AT_ONCE)
        return Audit(spark, AT_ONCE, inputs, scratch).run()


def order(shop: Shop, count: int) -> None:
    """Place so many orders of all keys; one that a server refuses is placed again."""
    wanted = len(shop.transactions()) + count
    while len(shop.transactions()) < wanted:
        with contextlib.suppress(NotifyError):
            shop.order()


def log_of(trade: Trade, directory: Path, numbers: Sequence[int], *, with_halves: bool = True) -> Path:
    """A worker's log with the messages of these transactions; without halves they are those of an outbox."""
    now_us = trade.at(numbers[0]) if numbers else trade.first_us

    async def write() -> None:
        nonlocal now_us
        store = LogStore(directory, clock=lambda: now_us)
        await store.open(now_us)
        for topic in TOPICS.values():
            await store.create_topic(Topic(topic))
        for n in numbers:
            now_us = trade.at(n)
            half = half_of(trade, n)
            if with_halves:
                await store.put([half], now_us)
                await store.decide([(half.id, half.producer_group, State.COMMITTED)], now_us)
            else:
                await store.put([msgspec.structs.replace(half, committed=True)], now_us)
        await store.close()

    asyncio.run(write())
    return directory


@pytest.mark.long
def test_a_workers_log_that_is_missing_is_missed_beside_any_other_log(trade: Trade, tmp_path: Path) -> None:
    """The shop's halves are one worker's, the bank's the other's; a third server has what is sent by an outbox."""
    for service, shard in (("shop", "worker-1"), ("bank", "worker-2")):
        trade.execute(service, f"UPDATE half_message SET shards = '{shard}'")
    first = log_of(trade, tmp_path / "worker-1", range(0, COUNT, 2))
    second = log_of(trade, tmp_path / "worker-2", range(1, COUNT, 2))
    outbox = log_of(trade, tmp_path / "outbox", range(COUNT, 2 * COUNT, 2), with_halves=False)
    beside = log_of(replace(trade, number=5), tmp_path / "beside", range(0, COUNT, 2), with_halves=False)
    lost_all = log_of(trade, tmp_path / "emptied", ())
    everything = Span(0, 1 << 52)

    def absent(*logs: Path) -> dict[int, list[str]]:
        with trade.inputs(logs=logs) as inputs:
            for log in inputs.logs:
                log.prepare(None, tmp_path / "scratch")
            return absent_shards(inputs, None, everything)

    assert absent(first, second) == absent(first, second, beside) == {}
    assert absent(first) == absent(first, beside) == {1: ["worker-2"]}
    assert absent(first, lost_all) == {}, "it may be the other worker's, which has lost everything"
    assert absent(first, outbox) == {}, "and so may one that begins later"
    assert absent(first, beside, lost_all) == {}


@pytest.mark.long
def test_losses_are_found_across_workers_logs_and_published_once(
    spark: Any, server: ServerProcess, shop: Shop, tmp_path: Path
) -> None:
    with running(shop.consumer):
        order(shop, ORDERS)
        os.kill(server.workers()[0], signal.SIGKILL)
        order(shop, ORDERS)
        eventually(lambda: shop.effects() == shop.transactions(), "the effects of all orders")
        eventually(lambda: lag(server.url, "points") == 0, "their acknowledgement")
        missing = outbox_row(shop)
        first = audited(spark, shop, server, tmp_path / "scratch")
        assert {name: ids for name, ids in found(first).items() if name != "REDELIVERED"} == {"LOST": {missing}}
        stored = in_queue(server)
        path = tmp_path / "plan.json"
        with opened(shop, server) as inputs:
            plan = plan_of(first, inputs)
            plan.write(path)
            repair = Repair(inputs, server.url, "a test", tmp_path / "scratch")
            rows = [row for _ in range(2) for row in asyncio.run(repair.run(plan, path))]
        assert [row["status"] for row in rows] == [201, 201], rows  # the second time the journal says so
        assert in_queue(server) == stored + 1
        eventually(lambda: lag(server.url, "points") == 0, "the effect of the message that was lost")
    second = audited(spark, shop, server, tmp_path / "scratch")
    assert (second.verdict, second.exit_code) == ("PASS", 0), (second.counts, second.reasons)
