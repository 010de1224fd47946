"""Causes, sources and completeness of real inputs; the same faults explained one by one, with the same class."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox
from notify.spark.audit import Audit
from notify.spark.causes.commands import Commands
from notify.spark.causes.grouping import tell_causes
from notify.spark.explain.explained import explain
from notify.spark.result import Found, Plan, Result
from notify.spark.times import instant_text
from notify.storage.groups import SettleKind
from notify.storage.log.store import LogStore
from notify.storage.records import State
from tests.audit.audited import PLAN
from tests.audit.trade import COUNT, GROUPS, TOPICS, WITH_INBOX, WITHOUT_INBOX, Trade, half_of, make_trade, row_of
from tests.audit.trade import effect_of as effect_row

LATER = [COUNT + 2 * n for n in range(5)]
"""Orders that the group without an inbox never gets."""
LATE = COUNT + 51
"""A payment that is settled 3 s after it came into its queue."""
GHOSTS, LACKING, MISSING = (1, 3, 5), (7, 9), (COUNT + 100, COUNT + 102, COUNT + 104)


@pytest.fixture(scope="module")
def trade(tmp_path_factory: pytest.TempPathFactory) -> Trade:
    """A trade with a group that is stuck, ghosts of the bank, effects that are missing, and lost orders."""
    trade = make_trade(tmp_path_factory.mktemp("told") / "trade")
    asyncio.run(_go_on(trade))
    engine = sa.create_engine(trade.url("shop"))
    with engine.begin() as connection:
        connection.execute(half_message.insert(), [row_of(trade, n) for n in (*LATER, *MISSING)])
    engine.dispose()
    engine = sa.create_engine(trade.url(WITH_INBOX))
    with engine.begin() as connection:
        connection.execute(notify_inbox.insert(), [effect_row(trade, n) for n in (*LATER, LATE)])
        gone = [trade.message(n) for n in LACKING]
        connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id.in_(gone)))
    engine.dispose()
    engine = sa.create_engine(trade.url("bank"))
    with engine.begin() as connection:
        connection.execute(half_message.insert(), [row_of(trade, LATE)])
        ghosts = [trade.name(n) for n in GHOSTS]
        connection.execute(half_message.delete().where(half_message.c.transaction_id.in_(ghosts)))
    engine.dispose()
    return trade


async def _go_on(trade: Trade) -> None:
    now_us = trade.at(COUNT)
    store = LogStore(trade.log, clock=lambda: now_us)
    await store.open(now_us)
    for n in LATER:
        now_us = trade.at(n)
        half = half_of(trade, n)
        offset = store.bounds(TOPICS["shop"], 0)[1]
        await store.put([half], now_us)
        await store.decide([(half.id, half.producer_group, State.COMMITTED)], now_us)
        await store.settle(WITH_INBOX, TOPICS["shop"], 0, [(offset, 1)], SettleKind.ACK, now_us + 4000)
    now_us = trade.at(LATE)
    half = half_of(trade, LATE)
    offset = store.bounds(TOPICS["bank"], 0)[1]
    await store.put([half], now_us)
    await store.decide([(half.id, half.producer_group, State.COMMITTED)], now_us)
    now_us += 3_000_000
    await store.settle(WITH_INBOX, TOPICS["bank"], 0, [(offset, 1)], SettleKind.ACK, now_us)
    now_us += 60_000_000
    await store.checkpoint()
    await store.close()


@pytest.fixture(scope="module")
def result(spark: Any, trade: Trade, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return told(spark, trade, PLAN, tmp_path_factory.mktemp("scratch"))


def told(spark: Any, trade: Trade, plan: Plan, scratch: Path) -> Result:
    with trade.inputs() as inputs:
        result = Audit(spark, plan, inputs, scratch).run()
        tell_causes(spark, plan, inputs, result, Commands())
        return result


def of_class(result: Result, name: str) -> list[Found]:
    return [case for case in result.found if case.finding == name]


@pytest.mark.long
def test_the_causes_of_real_inputs(result: Result, trade: Trade) -> None:
    sentences = {cause.finding: cause.sentence for cause in result.causes}
    last = instant_text(trade.at(COUNT - 2) + 4000)
    assert sentences["UNDELIVERED"] == (
        f"group {WITHOUT_INBOX} has been stuck since {last}: 5 messages of topic {TOPICS['shop']} are undelivered"
    )
    assert sentences["LOST"].startswith(
        f"producer group {GROUPS['shop']}, database shop: 3 messages committed and in no queue, "
    )
    assert sentences["GHOST"].startswith(f"producer group {GROUPS['bank']}, database bank: 3 messages delivered")
    assert sentences["ACKED_NO_EFFECT"].startswith(f"group {WITH_INBOX} acknowledged 2 messages of topic payment.made")
    assert [cause.finding for cause in result.causes][-1] == "UNDELIVERED" and len(result.causes) == 4


@pytest.mark.long
def test_ghosts_have_their_producer_group_and_source(result: Result, trade: Trade) -> None:
    for case in of_class(result, "GHOST"):
        named = {"producer_group": GROUPS["bank"], "sent_from": "bank", "source": trade.source("bank")}
        assert case.evidence | named == case.evidence


@pytest.mark.long
def test_completeness_counts_what_was_delivered_and_took_effect(result: Result) -> None:
    figures = result.completeness
    assert figures is not None
    committed = COUNT + len(LATER) + len(MISSING) - len(GHOSTS) + 1
    missed = len(LATER) + len(MISSING)
    assert (figures.due, figures.delivered) == (committed, committed - missed)
    assert figures.effective == committed - missed - len(LACKING)
    assert figures.is_met is False and "missed" in figures.sentence


@pytest.mark.long
def test_late_messages_lower_completeness_without_a_finding(
    spark: Any, result: Result, trade: Trade, tmp_path: Path
) -> None:
    figures = result.completeness
    assert figures is not None
    stricter = told(spark, trade, replace(PLAN, deliver_seconds=2), tmp_path / "scratch")
    assert stricter.completeness is not None and stricter.completeness.delivered == figures.delivered - 1
    assert stricter.counts == result.counts, "what came late is no finding"


@pytest.mark.long
def test_each_finding_is_explained_with_its_class(result: Result, trade: Trade, tmp_path: Path) -> None:
    names = {"LOST", "GHOST", "ACKED_NO_EFFECT", "UNDELIVERED"}
    assert {case.finding for case in result.found} == names
    with trade.inputs() as inputs:
        for case in result.found:
            known = explain(inputs, case.message_id, tmp_path, (5, 5))
            (verdict,) = known.verdicts
            assert case.finding in (verdict.finding, *verdict.others), (case, verdict)
            assert known.exit_code == 1 and case.message_id in known.sentence
        sound = explain(inputs, trade.message(20), tmp_path, (5, 5))
        assert (sound.exit_code, sound.verdicts[0].finding) == (0, ""), sound.sentence
        assert "Nothing is wrong with it" in sound.sentence and "with its effect at" in sound.sentence
        unknown = explain(inputs, trade.name(COUNT + 500), tmp_path, (5, 5))
        assert (unknown.exit_code, unknown.events) == (1, []) and "none of the given" in unknown.sentence
