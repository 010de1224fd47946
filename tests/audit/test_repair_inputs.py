"""A repair works on the inputs, and with the journal, of its own plan."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.cli.audit_inputs import named_logs
from notify.client.tables.definitions import half_message, notify_source
from notify.errors import Conflict, InvalidRequest
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.journal import Journal, done_beside
from notify.spark.repair.plan import read_plan
from notify.spark.repair.planning import plan_of
from notify.spark.result import Inputs
from notify.testing.process import ServerProcess
from tests.audit.repairing import carried_out, in_queue, lost, opened, outbox_row, result_of
from tests.audit.shop import TOPIC, Shop
from tests.audit.trade import COUNT, Trade, row_of
from tests.support.databases import empty_database
from tests.support.http import admin
from tests.support.shipping import shipped
from tests.support.transactions import new_id


@pytest.mark.long
def test_a_journal_is_of_one_plan(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    case = lost(outbox_row(shop))
    with opened(shop, server) as inputs:
        plan_of(result_of(case), inputs).write(path)
        carried_out(shop, server, read_plan(path), path)
        path.unlink()  # the log is restored from a backup, and its message is lost again
        later = plan_of(result_of(case), inputs)
    with pytest.raises(InvalidRequest, match="journal"):
        later.write(path)
    with pytest.raises(Conflict, match="another plan"):
        carried_out(shop, server, later, path)


@pytest.mark.long
def test_a_repair_that_a_restored_log_lacks_is_noticed(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    shop.order()
    path, case = tmp_path / "plan.json", lost(outbox_row(shop))
    with opened(shop, server) as inputs:
        inputs.logs[0].prepare(None, tmp_path / "scratch")
        plan = plan_of(result_of(case), inputs)
    server.stop()
    shutil.copytree(server.data_dir, tmp_path / "backup")
    server.start()
    assert {row["status"] for row in carried_out(shop, server, plan, path)} <= {200, 201} and in_queue(server) == 2
    assert [row["detail"] for row in carried_out(shop, server, plan, path)] == ["done before"]

    server.stop()
    shutil.rmtree(server.data_dir)
    shutil.copytree(tmp_path / "backup", server.data_dir)
    server.start()
    for dry_run in (True, False):
        (held,) = carried_out(shop, server, plan, path, dry_run=dry_run)
        assert held["status"] == 0 and "nothing is left of it" in held["detail"] and in_queue(server) == 1
    with opened(shop, server) as inputs:
        later = plan_of(result_of(case), inputs, done=done_beside(tmp_path / "later.json"))
    assert "a test" in later.items[0].evidence["done_before"] and "are gone" in later.needs_force[0]
    (done,) = carried_out(shop, server, plan, path, force=True)
    assert done["status"] in (200, 201) and in_queue(server) == 2


def test_a_repair_that_was_not_shipped_yet_is_not_gone(trade: Trade, tmp_path: Path) -> None:
    """A server ships a segment now and then; the log itself, without the repair, is an older copy."""
    path, n = tmp_path / "plan.json", COUNT + 1
    engine = sa.create_engine(trade.url("bank"))
    with engine.begin() as connection:
        connection.execute(half_message.insert().values(row_of(trade, n, mode="outbox", body=b"1")))
    engine.dispose()
    rows = {}
    for kind, place in (("shipped", shipped(trade.log, tmp_path / "shipped")), ("copied", trade.log)):
        with trade.inputs() as given:
            inputs = replace(given, logs=[LogInput(place, "log")])
            plan = plan_of(result_of(lost(trade.message(n))), inputs)
            (item,) = plan.items
            path.with_name(f"{path.name}.journal").unlink(missing_ok=True)
            with Journal(path, plan.made_at, "ann", "a test") as journal:
                journal.begin([item.key])
                journal.note([{"key": item.key, "status": 201, "detail": "", "as": item.again}])
            repair = Repair(inputs, "http://127.0.0.1:9", "a test", tmp_path / "scratch")
            (rows[kind],) = asyncio.run(repair.run(plan, path, dry_run=True))
    assert (rows["shipped"]["status"], rows["shipped"]["detail"]) == (201, "done before")
    assert rows["copied"]["status"] == 0 and "nothing is left of it" in rows["copied"]["detail"]


@pytest.mark.long
def test_a_repair_refuses_another_input_of_the_same_name(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    message_id = outbox_row(shop)
    backup = tmp_path / "backup" / server.data_dir.name
    shutil.copytree(server.data_dir, backup)
    shop.order()
    with opened(shop, server) as inputs:
        plan = plan_of(result_of(lost(message_id)), inputs)
        older = Inputs(inputs.databases, [LogInput(backup)])
        with pytest.raises(InvalidRequest, match="is not the one that the plan's audit read"):
            asyncio.run(Repair(older, server.url, "a test", tmp_path / "s").run(plan, tmp_path / "plan.json"))
    with shop.engine.begin() as connection:
        connection.execute(notify_source.update().values(id=new_id()))
    with pytest.raises(InvalidRequest, match="source id"):
        carried_out(shop, server, plan, tmp_path / "plan.json")
    assert [name for name, _ in named_logs(["/a/data", "/b/data", "x=/c/data", "/d/e"])] == [
        "/a/data", "/b/data", "x", "e",
    ]  # fmt: skip
    assert admin(server.url, "GET", f"topics/{TOPIC}")["queues"] and in_queue(server) == 1


@pytest.mark.long
def test_a_repair_needs_every_input_of_the_audit(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    message_id = outbox_row(shop)
    with (
        opened(shop, server) as inputs,
        empty_database("sqlite", {}, tmp_path) as url,
        contextlib.closing(Database(url, "points")) as points,
    ):
        plan = plan_of(result_of(lost(message_id)), Inputs([*inputs.databases, points], inputs.logs))
    assert [item.message_id for item in plan.items] == [message_id]
    with pytest.raises(InvalidRequest, match="database points"):
        carried_out(shop, server, plan, tmp_path / "plan.json")
    assert admin(server.url, "GET", "topics")["topics"] == []
