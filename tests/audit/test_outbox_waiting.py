"""Outbox rows that no target has: what a relay still sends, was refused or dropped is not lost, and never repeated."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message
from notify.client.tables.left_rows import Counted, counted
from notify.movers.relay.relay import Relay
from notify.protocol.wire import BridgeBatch
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.repair.checks import Now
from notify.spark.repair.plan import Item
from notify.spark.repair.planning import plan_of
from notify.spark.result import Found, Inputs, Result
from notify.storage.log.store import LogStore
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, PLAN, wait_until_closed
from tests.audit.shop import TOPIC, Shop
from tests.audit.trade import COUNT, make_trade, row_of
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.shop import make_engine


def found(result: Result) -> dict[str, set[str]]:
    classes: dict[str, set[str]] = {}
    for case in result.found:
        classes.setdefault(case.finding, set()).add(case.transaction_id)
    return classes


def changed(shop: Shop, name: str, relayed: int) -> None:
    with shop.engine.begin() as connection:
        of_name = half_message.c.transaction_id == name
        connection.execute(half_message.update().where(of_name).values(relayed=relayed))


def counted_in(engine: sa.Engine) -> list[Counted]:
    with engine.connect() as connection:
        return counted(connection)


@pytest.mark.long
def test_messages_waiting_for_the_relay_are_not_lost(spark: Any, database_urls: dict[str, str], tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        url = stack.enter_context(empty_database("postgresql", database_urls, tmp_path))
        shop = stack.enter_context(contextlib.closing(Shop(url, server.url)))
        database = stack.enter_context(contextlib.closing(Database(url, "shop")))
        outbox = stack.enter_context(
            contextlib.closing(TransactionProducer(server.url, group="orders", engine=shop.engine, mode="outbox"))
        )
        shop.order()
        sent = shop.transactions()
        nowhere = f"http://127.0.0.1:{free_port()}"
        auto = TransactionProducer(nowhere, group="orders", engine=shop.engine, mode="auto", half_timeout=0.25)
        with auto, Session(shop.engine) as session, session.begin():
            auto.send(session, Message(TOPIC, {"n": 3}, key="k"))
        (left,) = shop.transactions() - sent
        sent.add(left)
        for n in range(3):
            with Session(shop.engine) as session, session.begin():
                outbox.send(session, Message(TOPIC, {"n": n}, key="k"))
        waiting, refused, dropped = sorted(shop.transactions() - sent)
        changed(shop, refused, 2)
        changed(shop, dropped, 3)
        lost = shop.lose().partition(".")[0]
        wait_until_closed(database, AT_ONCE)
        inputs = Inputs([database], [LogInput(server.data_dir)])
        first = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
        assert found(first) == {"LOST": {lost}, "UNSENT": {waiting, refused, left}, "DROPPED": {dropped}}
        known = explain(inputs, waiting, tmp_path / "scratch", (1, 1))
        assert known.verdicts[0].finding == "UNSENT"
        held = never_repeated(inputs, [waiting, refused, dropped, left], tmp_path / "scratch")
        assert "relay" in held[waiting] and "refuses" in held[refused] and "dropped" in held[dropped]
        assert "left it behind" in held[left]
        asyncio.run(Relay(shop.engine, server.url).run(once=True))
        with TransactionProducer(server.url, group="orders", engine=shop.engine, mode="auto") as auto:
            auto.outgoing.start()
            eventually(lambda: counted_in(shop.engine) == [], "what was left behind to be sent")
        inputs = Inputs([database], [LogInput(server.data_dir)])
        second = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
        assert found(second)["UNSENT"] == {refused}


def test_a_log_names_the_database_whose_messages_a_relay_brought(tmp_path: Path) -> None:
    """Otherwise an audit says that no log has a message of the database, and misses that its rows were wiped."""
    with contextlib.ExitStack() as stack:
        server = ServerProcess(tmp_path / "data").start()
        stack.callback(server.stop)
        url = f"sqlite:///{tmp_path}/shop.db"
        engine = make_engine(url)
        stack.callback(engine.dispose)
        create_tables(engine)
        producer = TransactionProducer(server.url, group="orders", engine=engine, mode="outbox")
        stack.callback(producer.close)
        with Session(engine) as session, session.begin():
            producer.send(session, Message(TOPIC, "1"))
        asyncio.run(Relay(engine, server.url).run(once=True))
        database = stack.enter_context(contextlib.closing(Database(url, "shop")))
        log = LogInput(server.data_dir)
        log.prepare(None, tmp_path / "scratch")
        sent = log.sent()
    assert list(sent) == [database.source_id()] and list(sent[database.source_id()]) == ["orders"]


def never_repeated(inputs: Inputs, transactions: list[str], scratch: Path) -> dict[str, str]:
    """Why each is held back when it is said to be lost, both in a plan and when one is carried out."""
    evidence = {"local": "COMMITTED", "t_us": 1}
    cases = [Found("LOST", name, topic=TOPIC, at_us=1, evidence=dict(evidence)) for name in transactions]
    plan = plan_of(Result("FINDINGS", found=cases, totals={"committed": 9}), inputs)
    assert not plan.items
    items = [Item(f"republish:{c.message_id}", "republish", "LOST", c.message_id, "publish it") for c in cases]
    now = Now.of(inputs, items, scratch)
    for item, held in zip(items, plan.held_back, strict=True):
        settled = now.settled(item)
        assert settled is not None and settled.status == 0 and settled.why in held.why
    return {held.message_id.partition(".")[0]: held.why for held in plan.held_back}


@pytest.mark.long
def test_a_bridge_has_lost_what_it_has_passed(spark: Any, tmp_path: Path) -> None:
    trade = make_trade(tmp_path / "trade")
    passed, later = COUNT, COUNT + 2
    asyncio.run(bridged(trade.log, trade.source("shop"), trade.at(passed) + 5000))
    engine = sa.create_engine(trade.url("shop"))
    with engine.begin() as connection:
        rows = [row_of(trade, n, mode="outbox", relayed=0, body=b"1") for n in (passed, later)]
        connection.execute(half_message.insert(), rows)
    engine.dispose()
    with trade.inputs() as inputs:
        result = Audit(spark, PLAN, inputs, tmp_path / "scratch").run()
        assert found(result) == {"LOST": {trade.name(passed)}, "UNSENT": {trade.name(later)}}
        plan = plan_of(result, inputs)
        assert not plan.items and all("backfill" in held.why for held in plan.held_back if held.finding == "LOST")


async def bridged(log: Path, source: str, at_us: int) -> None:
    now_us = at_us
    store = LogStore(log, clock=lambda: now_us)
    await store.open(now_us)
    batch = BridgeBatch(epoch=1, expected_position="", position="0-1-1", claim=True)
    await store.append_from_bridge(source, batch, [], now_us)
    now_us += 60_000_000
    await store.checkpoint()
    await store.close()
