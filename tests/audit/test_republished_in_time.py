"""A message that is published again keeps its time, and lasts no longer than it was to last."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from notify.protocol import ids
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.planning import plan_of
from notify.testing.process import ServerProcess
from tests.audit.repairing import carried_out, in_queue, lost, opened, outbox_row, result_of
from tests.audit.shop import TOPIC, Shop
from tests.support.databases import empty_database
from tests.support.groups import Caller, subscribe

HOUR = 3600


@pytest.mark.long
def test_neither_early_nor_after_its_end(database_urls: dict[str, str], tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        url = stack.enter_context(empty_database("postgresql", database_urls, tmp_path))
        shop = stack.enter_context(contextlib.closing(Shop(url, server.url)))
        now = datetime.now(UTC).replace(tzinfo=None)
        half_an_hour_ago = now - timedelta(seconds=HOUR / 2)
        at = outbox_row(shop, deliver_at=now + timedelta(seconds=HOUR))
        after = outbox_row(shop, delay=HOUR, ttl=60.0)
        lasting = outbox_row(shop, ttl=float(HOUR), created_at=half_an_hour_ago)
        over = outbox_row(shop, ttl=60.0, created_at=half_an_hour_ago)
        subscribe(server.url, "points", TOPIC, start="earliest")
        with opened(shop, server) as inputs:
            plan = plan_of(result_of(*map(lost, (at, after, lasting, over))), inputs)
        assert [held.message_id for held in plan.held_back if "expired" in held.why] == [over]
        assert ["at its time" in item.what for item in plan.items] == [True, True, False]
        rows = carried_out(shop, server, plan, tmp_path / "plan.json")
        assert [row["status"] for row in rows] == [201, 201, 201], rows
        assert in_queue(server) == 1
        (message,) = Caller(server.url, "points", "i").receive(TOPIC)
        assert message["headers"]["notify-first-id"] == lasting
        log = LogInput(server.data_dir)
        log.prepare(None, tmp_path / "scratch")
        sent = {ids.from_text(row["as"].partition(".")[0]) for row in rows[:2]}
        due_us = [row["due_us"] for row in log.messages_of(sent)]
        assert len(due_us) == 2 and all(abs(us / 1e6 - time.time() - HOUR) < HOUR / 2 for us in due_us)
