"""Dead letters that nobody sent again are counted by group and reason, and fail an audit that is told so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox
from notify.errors import InvalidRequest
from notify.protocol.wire import Payload, encode_msgpack
from notify.server.delivery.settling import dead_payload
from notify.spark.audit import Audit
from notify.spark.checks.dead_letters import of_log
from notify.spark.explain.explained import explain
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Plan, Result
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id, retry_topic
from notify.storage.records import NewMessage, NewTransaction, State, StoredMessage
from notify.storage.topics import Topic
from tests.audit.audited import PLAN
from tests.audit.trade import COUNT, TOPICS, WITH_INBOX, WITHOUT_INBOX, Trade, effect_of, half_of, make_trade, row_of

PURGED, SENT_AGAIN, DROPPED, *KEPT = [COUNT + 2 * n for n in range(6)]
REASONS = ("no such customer", "no such customer", "the card was refused")
LETTERS = dead_letter_topic(WITH_INBOX)


async def die(trade: Trade) -> None:
    """Six orders become dead letters of the group: the first is purged, the second sent again, the third dropped."""
    now_us = trade.at(COUNT)
    store = LogStore(trade.log, clock=lambda: now_us)
    await store.open(now_us)
    await store.create_topic(Topic(LETTERS))
    again = retry_topic(WITH_INBOX, TOPICS["shop"])
    await store.create_topic(Topic(again))
    await store.subscribe(Subscription(WITH_INBOX, again, inbox_from_us=0), [0])
    numbers = [PURGED, SENT_AGAIN, DROPPED, *KEPT]
    for n, reason in zip(numbers, ("old", "old", "old", *REASONS), strict=True):
        now_us = trade.at(n)
        half = half_of(trade, n)
        offset = store.bounds(TOPICS["shop"], 0)[1]
        await store.put([half], now_us)
        await store.decide([(half.id, half.producer_group, State.COMMITTED)], now_us)
        (message,) = store.read(TOPICS["shop"], 0, offset, 1, 1 << 20)
        assert isinstance(message, StoredMessage)
        store.dead_letter_soon(WITH_INBOX, [(message, dead_payload(WITH_INBOX, message, 16, reason, 0))], now_us)
        await store.settle(WITHOUT_INBOX, TOPICS["shop"], 0, [(offset, 1)], SettleKind.ACK, now_us)
    store.trim(LETTERS, 0, 1)
    new = NewMessage(again, encode_msgpack(Payload(again, b"again")))
    await store.put([NewTransaction(redriven_id(LETTERS, trade.id(SENT_AGAIN), 1), "", [new], committed=True)], now_us)
    await store.settle(WITH_INBOX, again, 0, [(0, 1)], SettleKind.FILTERED, now_us)
    notes = dropped_topic(WITH_INBOX)
    await store.create_topic(Topic(notes))
    note = NewMessage(notes, encode_msgpack(Payload(notes, b"")))
    await store.put([NewTransaction(redriven_id(LETTERS, trade.id(DROPPED), 2), "", [note], committed=True)], now_us)
    now_us += 60_000_000
    await store.checkpoint()
    await store.close()
    engine = sa.create_engine(trade.url("shop"))
    with engine.begin() as connection:
        connection.execute(half_message.insert(), [row_of(trade, n) for n in numbers])
    engine.dispose()


@pytest.mark.long
def test_a_dead_letter_that_took_effect_says_so(spark: Any, tmp_path: Path) -> None:
    """Its inbox has one, a ledger another; and those that were dropped or purged lack nothing then."""
    trade = make_trade(tmp_path / "trade")
    asyncio.run(die(trade))
    proven = [PURGED, DROPPED, KEPT[1]]
    rows = ", ".join(f"('{trade.message(n)}', '{WITH_INBOX}')" for n in proven)
    trade.execute(
        WITH_INBOX, "CREATE TABLE ledger (message_id TEXT, consumer_group TEXT)", f"INSERT INTO ledger VALUES {rows}"
    )
    engine = sa.create_engine(trade.url(WITH_INBOX))
    with engine.begin() as connection:
        connection.execute(notify_inbox.insert().values(effect_of(trade, KEPT[0])))
    engine.dispose()
    effects = ((WITH_INBOX, "SELECT message_id, consumer_group FROM ledger"),)
    result = audited(spark, trade, replace(PLAN, effects=effects))
    assert (result.verdict, result.counts["DEAD"], result.counts["LEFT_OUT"]) == ("PASS", len(KEPT), 0)
    told = {f.message_id: f.detail.partition("; ")[2] for f in result.found if f.finding == "DEAD"}
    again = "drop the dead letter, do not redrive it"
    assert told == {
        trade.message(KEPT[0]): f"it took effect anyway, as the inbox of {WITH_INBOX} shows: {again}",
        trade.message(KEPT[1]): f"it took effect anyway, as --effects shows: {again}",
        trade.message(KEPT[2]): "",
    }
    with trade.inputs() as inputs:
        sentences = [
            explain(inputs, trade.message(n), tmp_path / "explained", (5, 5), effects=effects).sentence
            for n in (*KEPT, DROPPED)
        ]
    assert ["took effect anyway" in sentence for sentence in sentences] == [True, True, False, False]
    assert all("DEAD" in sentence for sentence in sentences[:3]) and "LEFT_OUT" not in sentences[3]


def audited(spark: Any, trade: Trade, plan: Plan) -> Result:
    with trade.inputs() as inputs:
        return Audit(spark, plan, inputs, trade.directory / "scratch").run()


@pytest.mark.long
def test_dead_letters_are_counted(spark: Any, tmp_path: Path) -> None:
    trade = make_trade(tmp_path / "trade")
    asyncio.run(die(trade))
    result = audited(spark, trade, replace(PLAN, fail_on=("DEAD",)))
    assert (result.verdict, result.exit_code, result.reasons) == ("FINDINGS", 1, [])
    assert result.counts["DEAD"] == len(KEPT)
    gone = {f.message_id: f.left[0].how for f in result.found if f.finding == "LEFT_OUT"}
    assert gone == {trade.message(PURGED): "dead letter purged", trade.message(DROPPED): "dead letter dropped"}
    assert {case.message_id for case in result.found if case.finding == "DEAD"} == {trade.message(n) for n in KEPT}
    assert result.dead == [
        {"group": WITH_INBOX, "reason": "no such customer", "count": 2},
        {"group": WITH_INBOX, "reason": "the card was refused", "count": 1},
    ]
    log = LogInput(trade.log)
    log.prepare(None, trade.directory / "scratch")
    assert of_log(spark, log, trade.at(KEPT[-1]), trade.at(2 * COUNT)).count == 1, "of a range only those in it"
    with pytest.raises(InvalidRequest, match="there is no class DEED"):
        audited(spark, trade, replace(PLAN, fail_on=("DEED",)))
