"""A log that lost its disk, and was restored without its newest messages: the audit knows, and repairs what it may."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.planning import plan_of
from notify.storage.log.disk import Disk
from notify.storage.log.restored_start import begin_at_the_end
from notify.storage.log.store import LogStore
from tests.audit.audited import PLAN
from tests.audit.trade import COUNT, WITH_INBOX, Trade, effect_of, row_of
from tests.crash.disk import LostDisks


def restored(trade: Trade) -> None:
    """Have the log continue as `notify restore --from` leaves it."""

    async def begun() -> None:
        store = LogStore(trade.log, clock=lambda: trade.at(COUNT) + 20_000_000)
        await store.open(time.time_ns() // 1000)
        await store.begin_generation(2, trade.at(COUNT))
        await store.close()

    begin_at_the_end(Disk(trade.log), trade.at(COUNT) + 20_000_000)
    asyncio.run(begun())


def insert(trade: Trade, service: str, table: sa.Table, *rows: dict[str, Any]) -> None:
    engine = sa.create_engine(trade.url(service))
    with engine.begin() as connection:
        connection.execute(table.insert(), list(rows))
    engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("is_restored", [True, pytest.param(False, marks=pytest.mark.long)])
def test_losses_with_the_disk_are_distinguished_from_others(
    spark: Any, trade: Trade, tmp_path: Path, is_restored: bool
) -> None:
    """Lost with the disk: a message that one group had handled, one that nobody had, a published one that was handled,
    and a half that had been rolled back. The same rows beside a log that never lost its disk are held back."""
    handled, unhandled, published, rolled_back = (COUNT + n for n in (2, 4, 6, 8))
    kept = {"body": trade.body, "key": "k", "mode": "half"}
    insert(trade, "shop", half_message, row_of(trade, handled, **kept), row_of(trade, unhandled, **kept))
    insert(trade, "shop", half_message, row_of(trade, rolled_back, state="ROLLED_BACK", topic=""))
    insert(trade, WITH_INBOX, notify_inbox, effect_of(trade, handled), effect_of(trade, published))
    if is_restored:
        restored(trade)
    with trade.inputs() as inputs:
        result = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
        plan = plan_of(result, inputs)
        (told,) = explain(inputs, trade.message(published), tmp_path / "copies", (5, 5)).verdicts
    left = "FORGOTTEN" if is_restored else "ORPHAN_ROW"
    assert told.finding == left
    found: dict[str, set[str]] = {}
    for case in result.found:
        found.setdefault(case.finding, set()).add(case.message_id)
    others = {trade.message(published), trade.message(rolled_back)}
    assert found == {"LOST": {trade.message(handled), trade.message(unhandled)}, left: others}
    assert result.reasons == []
    items = {item.message_id: item for item in plan.items}
    if is_restored:
        assert items.keys() == found["LOST"] and not plan.held_back
        assert items[trade.message(handled)].skipped_by == (WITH_INBOX,)
        assert f"the inboxes of {WITH_INBOX} skip it" in items[trade.message(handled)].what
        assert items[trade.message(unhandled)].skipped_by == ()
    else:
        assert items.keys() == {trade.message(unhandled)}
        assert {held.message_id for held in plan.held_back} == {trade.message(handled)} | others


def test_a_log_that_goes_on_while_it_is_read_was_not_cut(trade: Trade, tmp_path: Path) -> None:
    """A server that ships its log begins a segment every few seconds, with a checkpoint where that begins."""
    log = LogInput(trade.log)
    restored(trade)  # a new segment, and a checkpoint in it
    log.prepare(None, tmp_path / "scratch")
    assert log.problems == []


# --- one round of `make crash-disk`: the disk of a server that ships its log is lost, restored, audited and repaired


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_lost_disk_is_restored_audited_and_repaired(spark: Any, tmp_path: Path) -> None:
    disks = LostDisks(spark, tmp_path, seed=1, say=print)
    with disks.at_work():
        disks.round(1)
    assert disks.complaints == []
