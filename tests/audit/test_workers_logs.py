"""An audit of the logs of two workers, one of which was killed, and its repair through the one port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.errors import NotifyError
from notify.spark.audit import Audit
from notify.spark.databases import Database
from notify.spark.log_input import LogInput
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.planning import plan_of
from notify.spark.result import Inputs, Result
from notify.testing.process import ServerProcess
from notify.workers import worker_names
from tests.audit.audited import AT_ONCE, found, wait_until_closed
from tests.audit.repairing import in_queue, outbox_row
from tests.audit.shop import Shop
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


@pytest.mark.long
def test_what_is_lost_is_found_in_the_logs_of_all_workers_and_published_once(
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
