"""A group that adopts an inbox later: what it acknowledged before took effect, without a row."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import Consumer
from notify.client.tables.definitions import half_message, notify_inbox
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.planning import plan_of
from notify.spark.result import Inputs
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import State
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, PLAN, found, wait_until_closed
from tests.audit.repairing import in_queue
from tests.audit.shop import TOPIC, Shop
from tests.audit.trade import AGO_US, TOPICS, WITH_INBOX, WITHOUT_INBOX, Trade, half_of, row_of
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import lag, running
from tests.support.http import admin

BEFORE = 20


def settled(server: ServerProcess, count: int) -> bool:
    """Whether so many messages are in the queue, and the group has settled all."""
    return in_queue(server) == count and lag(server.url, "points") == 0


@pytest.mark.long
def test_settlements_before_the_inbox_are_neither_findings_nor_sent_again(
    spark: Any, database_urls: dict[str, str], tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "data").start()
    with (
        contextlib.ExitStack() as stack,
        empty_database("postgresql", database_urls, tmp_path) as url,
    ):
        stack.callback(server.stop)
        shop = stack.enter_context(contextlib.closing(Shop(url, server.url)))
        database = stack.enter_context(contextlib.closing(Database(url, "shop")))
        bare = Consumer(server.url, group="points")
        bare.subscribe(TOPIC, start="earliest")(lambda message: None)
        with running(bare):
            for _ in range(BEFORE):
                shop.order()
            eventually(lambda: settled(server, BEFORE), "all are settled without an inbox")
        early = sorted(shop.transactions())
        with running(shop.consumer):
            shop.order()
            eventually(lambda: settled(server, BEFORE + 1), "an effect with an inbox")
        inputs = Inputs([database], [LogInput(server.data_dir)])
        wait_until_closed(database, AT_ONCE)
        first = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
        assert (first.verdict, first.counts["ACKED_NO_EFFECT"]) == ("PASS", 0), (first.counts, first.reasons)
        done = first.completeness
        assert done is not None and done.effective == done.delivered
        known = explain(inputs, early[0], tmp_path / "scratch", (1, 1))
        assert known.verdicts[0].finding == "", known.sentence

        with shop.engine.begin() as connection:
            connection.execute(notify_inbox.delete())
            effect = {"consumer_group": "points", "message_id": "0.0", "created_at": sa.func.now()}
            connection.execute(notify_inbox.insert().values(effect))  # the inbox is not empty
        inputs = Inputs([database], [LogInput(server.data_dir)])
        second = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
        (late,) = shop.transactions() - set(early)
        assert [f.transaction_id for f in second.found if f.finding == "ACKED_NO_EFFECT"] == [late]
        items = plan_of(second, inputs).items
        assert [(item.action, item.message_id) for item in items] == [("redeliver", f"{late}.0")]

        asked = {"reason": "a test", "ids": [f"{early[0]}.0"]}
        for dry_run in (True, False):
            said = admin(server.url, "POST", "groups/points/redeliver", asked | {"dry_run": dry_run})
            assert [item.get("code") for item in said["result"]["items"]] == ["before_inbox"]
        said = admin(server.url, "POST", "groups/points/redeliver", asked | {"force": True})
        assert [item["status"] for item in said["result"]["items"]] == [201]


@pytest.mark.long
def test_a_message_that_another_group_had_before_is_judged(spark: Any, trade: Trade) -> None:
    """The inbox began between the acknowledgements of two groups: the later one has to have its row."""
    number, began_us = trade.count, trade.at(trade.count) + 5000
    asyncio.run(settled_around(trade, number, began_us))
    engine = sa.create_engine(trade.url("shop"))
    with engine.begin() as connection:
        connection.execute(half_message.insert().values(row_of(trade, number)))
    engine.dispose()
    trade.execute(WITH_INBOX, f"DELETE FROM notify_inbox WHERE message_id = '{trade.message(4)}'")
    with trade.inputs() as inputs:
        result = Audit(spark, PLAN, inputs, trade.directory / "scratch").run()
    assert found(result) == {"ACKED_NO_EFFECT": {trade.message(number)}}


async def settled_around(trade: Trade, number: int, began_us: int) -> None:
    """Let a group without an inbox settle one more message before the inbox of the other began, and that one after."""
    now_us = trade.at(number)
    store = LogStore(trade.log, clock=lambda: now_us)
    await store.open(now_us)
    made = half_of(trade, number)
    await store.put([made], now_us)
    await store.decide([(made.id, made.producer_group, State.COMMITTED)], now_us + 1000)
    topic, runs = TOPICS["shop"], [(trade.count // 2, 1)]
    now_us = began_us - 1000
    await store.settle(WITHOUT_INBOX, topic, 0, runs, SettleKind.ACK, now_us)
    await store.sync()
    now_us = began_us + 1000
    await store.subscribe(Subscription(WITH_INBOX, topic, inbox_from_us=began_us), None)
    await store.settle(WITH_INBOX, topic, 0, runs, SettleKind.ACK, now_us)
    await store.sync()
    now_us += AGO_US // 2
    await store.checkpoint()
    await store.close()
