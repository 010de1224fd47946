"""Repairs of lost messages, planned and carried out through a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.plan import RepairPlan
from notify.spark.result import Found, Inputs, Result
from notify.testing.process import ServerProcess
from tests.audit.shop import TOPIC, Shop
from tests.support.http import admin
from tests.support.transactions import new_id


@contextlib.contextmanager
def opened(shop: Shop, server: ServerProcess) -> Iterator[Inputs]:
    with contextlib.closing(Database(shop.url, "shop")) as database:
        yield Inputs([database], [LogInput(server.data_dir)])


def outbox_row(shop: Shop, transaction_id: str = "", **fields: Any) -> str:
    """A row whose relay has sent it, to a log that has lost it; the message's id."""
    name = transaction_id or new_id()
    row = shop.row(name, mode="outbox", body=b'{"n": 99}', key="99", **fields)
    with shop.engine.begin() as connection:
        connection.execute(half_message.insert().values(row))
    return f"{name}.0"


def lost(message_id: str, **evidence: Any) -> Found:
    at_us = ids.milliseconds(ids.from_text(message_id.partition(".")[0])) * 1000
    known = {"local": "COMMITTED", "server": "unknown", "mode": "outbox", "t_us": at_us} | evidence
    return Found("LOST", message_id.partition(".")[0], topic=TOPIC, at_us=at_us, evidence=known)


def result_of(*cases: Found, reasons: tuple[str, ...] = ()) -> Result:
    totals = {"committed": 10_000}
    return Result("FINDINGS", found=list(cases), totals=totals, reasons=list(reasons), from_us=1, to_us=2)


def carried_out(
    shop: Shop, server: ServerProcess, plan: RepairPlan, path: Path, *, dry_run: bool = False, force: bool = False
) -> list[dict[str, Any]]:
    with opened(shop, server) as inputs:
        repair = Repair(inputs, server.url, "a test", path.parent / "scratch", force=force)
        return asyncio.run(repair.run(plan, path, dry_run=dry_run))


def in_queue(server: ServerProcess) -> int:
    queues = admin(server.url, "GET", f"topics/{TOPIC}")["queues"]
    return sum(queue["end"] - queue["start"] for queue in queues)
