"""Many groups and sources: the bound of what is listed is no bound of what is checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.spark.judge.completeness_proof import MOST_LISTED, Proof
from notify.spark.result import Result
from notify.storage.groups import Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.topics import Topic
from tests.audit.trade import Trade, make_trade

COUNT = MOST_LISTED + 50


def source(n: int) -> str:
    return f"{n:08d}-0000-4000-8000-00000000000f"


async def with_many(trade: Trade) -> None:
    """One producer more for each source, and one group more for each inbox."""
    now_us = trade.at(1000)
    store = LogStore(trade.log, clock=lambda: now_us)
    await store.open(now_us)
    await store.create_topic(Topic("many"))
    payload = encode_msgpack(Payload("many", b"x"))
    made = [NewTransaction(ids.new_id(), "makers", [NewMessage("many", payload)], source(n), "i") for n in range(COUNT)]
    await store.put(made, now_us)
    await store.decide([(t.id, t.producer_group, State.COMMITTED) for t in made], now_us)
    for n in range(COUNT):
        await store.subscribe(Subscription(f"g{n:03d}", "many", inbox_from_us=0), [0])
    await store.checkpoint()
    await store.close()


@pytest.mark.long
def test_the_last_source_and_the_last_group_are_checked_as_the_first(tmp_path: Path) -> None:
    trade = make_trade(tmp_path / "trade")
    asyncio.run(with_many(trade))
    with trade.inputs() as inputs:
        inputs.logs[0].prepare(None, tmp_path / "scratch")
        end_us = trade.at(100_000)
        # "a…" sort before the groups whose inbox is missing.
        silent = [f"a{n:03d}" for n in range(MOST_LISTED)]
        result = Result()
        Proof(inputs, result, 0, end_us).of_inboxes([*silent, "g149"])
        assert ["g149" in reason for reason in result.reasons] == [True]
        assert [line.name for line in result.coverage if not line.is_whole] == ["group g149"]
        assert len(result.coverage) == MOST_LISTED + 1 and result.coverage[-1].name == "1 more"

        result = Result()
        Proof(inputs, result, 0, end_us).of_sources()
        missing = [reason for reason in result.reasons if "no given database" in reason]
        assert len(missing) < COUNT and f"{COUNT - len(missing)} more" in result.reasons[-1], result.reasons[-1]
