"""An audit asks again once it has read its inputs: for a log that was not given, and for purges beside it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.tables.purge import purge_by_force
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.judge.completeness_proof import MANY
from notify.spark.result import Plan, Result
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.disk import Disk
from notify.storage.log.gaps import OFFSETS_APART
from notify.storage.log.restored_start import begin_at_the_end
from notify.storage.log.store import LogStore
from notify.storage.records import NewTransaction, State
from notify.storage.sql.rows import text_of
from notify.storage.topics import Topic
from tests.audit.audited import PLAN, found
from tests.audit.plant import edit
from tests.audit.trade import AGO_US, COUNT, SENDERS, TOPICS, WITH_INBOX, Trade, half_of, make_trade, service_of


def audited(spark: Any, trade: Trade, plan: Plan = PLAN, progress: Callable[[str], None] = lambda text: None) -> Result:
    with trade.inputs() as inputs:
        return Audit(spark, plan, inputs, trade.directory / "scratch", progress).run()


def of_two_shards(trade: Trade) -> set[int]:
    """Let the shop's rows name two shards, and remove from the log what is in the second one: its numbers."""
    second = {n for n in range(COUNT) if n % 4 == 2}
    listed = ", ".join(f"'{trade.name(n)}'" for n in second)
    trade.execute(
        "shop", "UPDATE half_message SET shards = 'a'",
        f"UPDATE half_message SET shards = 'b' WHERE transaction_id IN ({listed})",
    )  # fmt: skip
    without(trade, second)
    return second


def without(trade: Trade, numbers: set[int]) -> None:
    """Remove transactions from the log, as if it had never had them."""
    gone = {trade.id(n) for n in numbers}
    edit(trade.log, lambda entry: None if entry[48:64] in gone else entry)
    trade.without_index()


@pytest.mark.long
@pytest.mark.parametrize("method", ["full", "digest"])
def test_messages_of_a_log_that_was_not_given_are_not_lost(
    spark: Any, trade: Trade, tmp_path: Path, method: str
) -> None:
    second = of_two_shards(trade)
    without(trade, {8})  # of the first shard, whose log is there
    result = audited(spark, trade, replace(PLAN, method=method))
    assert found(result) == {"LOST": {trade.message(8)}}
    assert result.counts["PENDING"] == len(second)
    (reason,) = result.reasons
    assert "shard b" in reason and "--log" in reason
    assert [(line.name, line.kind) for line in result.coverage if not line.is_whole] == [("database shop", "shard")]
    with trade.inputs() as inputs:
        (lost,) = explain(inputs, trade.message(8), tmp_path / "copies", (5, 5)).verdicts
        (away,) = explain(inputs, trade.message(10), tmp_path / "copies", (5, 5)).verdicts
    assert (lost.finding, away.finding) == ("LOST", "INCONCLUSIVE") and "shard b" in away.sentence


async def write_some(trade: Trade, numbers: Sequence[int], again: Set[int] = frozenset()) -> None:
    """Write the log of a server that has some of the trade, of its own: its offsets have no gaps. `again`: it has only
    what a repair published for these."""
    now_us = [trade.first_us]
    store = LogStore(trade.log, clock=lambda: now_us[0])
    await store.open(now_us[0])
    for topic in TOPICS.values():
        await store.create_topic(Topic(topic))
        await store.subscribe(Subscription(WITH_INBOX, topic, inbox_from_us=0), [0])
    await put_some(store, trade, numbers, dict.fromkeys(TOPICS.values(), 0), now_us, again)


async def put_some(
    store: LogStore,
    trade: Trade,
    numbers: Sequence[int],
    offsets: dict[str, int],
    now_us: list[int],
    again: Set[int] = frozenset(),
) -> None:
    """Put transactions into a log whose queues have these offsets next, and close it. `now_us`: its clock."""
    for n in numbers:
        now_us[0], topic = trade.at(n), TOPICS[service_of(n)]
        half = half_of(trade, n)
        if n in again:
            published = ids.derived(half.id, ids.republished(0))
            half = NewTransaction(published, "", half.messages, committed=True)
        await store.put([half], now_us[0])
        if n not in again:
            await store.decide([(half.id, half.producer_group, State.COMMITTED)], now_us[0] + 2000)
        await store.settle(WITH_INBOX, topic, 0, [(offsets[topic], 1)], SettleKind.ACK, now_us[0] + 4000)
        offsets[topic] += 1
    await store.sync()
    now_us[0] += AGO_US // 2
    await store.checkpoint()
    await store.close()


async def go_on_restored(trade: Trade, numbers: Sequence[int], offsets: dict[str, int]) -> None:
    """Write more of the trade to the log after its disk was lost, and its shipped segments were restored."""
    now_us = [trade.at(numbers[0]) - 1]
    begin_at_the_end(Disk(trade.log), now_us[0])
    store = LogStore(trade.log, clock=lambda: now_us[0])
    await store.open(now_us[0])
    await store.begin_generation(2, now_us[0])
    behind = {topic: offset + OFFSETS_APART for topic, offset in offsets.items()}
    await put_some(store, trade, numbers, behind, now_us)


@pytest.mark.long
def test_effects_from_a_missing_log_are_not_lost(spark: Any, trade: Trade) -> None:
    """All servers have the same shard name, and send to the same groups."""
    trade.execute("shop", "UPDATE half_message SET shards = 'main'")
    shutil.rmtree(trade.log)
    elsewhere = {n for n in range(COUNT) if n % 4 == 2}
    asyncio.run(write_some(trade, sorted(set(range(COUNT)) - elsewhere)))
    result = audited(spark, trade)
    assert (result.verdict, found(result)) == ("INCONCLUSIVE", {})
    assert result.counts["PENDING"] == len(elsewhere)
    (reason,) = result.reasons
    assert f"{len(elsewhere)} committed messages of database shop took effect" in reason and "--log" in reason
    assert [(line.name, line.kind) for line in result.coverage if not line.is_whole] == [("database shop", "shard")]


@pytest.mark.long
def test_many_messages_that_were_lost_and_published_again_are_repaired(spark: Any, trade: Trade) -> None:
    """They took effect, and the log never had them under their own ids. From ten of them on, another log was missed,
    nothing could be judged, and no plan had an item."""
    again = {n for n in range(COUNT) if n % 4 == 2}
    shutil.rmtree(trade.log)
    asyncio.run(write_some(trade, range(COUNT), again))
    # A consumer writes a row for the id under which it came, too.
    row = "INSERT INTO notify_inbox (consumer_group, message_id, created_at) "
    row += "SELECT consumer_group, '{}', created_at FROM notify_inbox WHERE message_id = '{}'"
    new_ids = {n: ids.message_id(ids.derived(trade.id(n), ids.republished(0)), 0) for n in again}
    trade.execute(WITH_INBOX, *(row.format(new_id, trade.message(n)) for n, new_id in new_ids.items()))
    result = audited(spark, trade)
    assert len(again) >= MANY and result.totals["repaired"] == len(again)
    assert (result.verdict, result.counts["LOST"], result.counts["PENDING"]) == ("PASS", 0, 0), result.counts


@pytest.mark.long
def test_effects_from_a_missing_log_are_not_lost_next_to_a_restored_log(spark: Any, tmp_path: Path) -> None:
    """Offsets that a restore skips are no messages that the log has lost."""
    trade = make_trade(tmp_path / "trade", step_us=20_000_000)
    shutil.rmtree(trade.log)
    elsewhere = {n for n in range(COUNT) if n % 4 == 2}
    written = sorted(set(range(COUNT)) - elsewhere)
    before, after = written[: len(written) // 2], written[len(written) // 2 :]
    asyncio.run(write_some(trade, before))
    services = Counter(map(service_of, before))
    asyncio.run(go_on_restored(trade, after, {TOPICS[service]: services[service] for service in SENDERS}))
    result = audited(spark, trade)
    assert (result.verdict, found(result)) == ("INCONCLUSIVE", {})
    assert result.counts["PENDING"] == len(elsewhere)
    (reason,) = result.reasons
    assert "committed messages of database shop took effect" in reason and "--log" in reason


@pytest.mark.long
def test_rows_that_are_purged_while_they_are_read_are_no_ghosts(spark: Any, trade: Trade) -> None:
    middle_us = trade.at(COUNT // 2)

    def purge(doing: str) -> None:
        if "databases" not in doing:
            return
        engine = sa.create_engine(trade.url("bank"))
        assert purge_by_force(engine, older_than=time.time() - middle_us / 1e6).rows > COUNT // 5
        engine.dispose()
        trade.execute(
            WITH_INBOX,
            f"UPDATE notify_source SET inbox_from = {middle_us // 1000 + 1}",
            f"DELETE FROM notify_inbox WHERE created_at < '{text_of(middle_us)}'",
        )

    result = audited(spark, trade, progress=purge)
    assert (result.verdict, result.reasons, found(result)) == ("PASS", [], {})
    assert [what for what in ("local rows", "inbox rows") if any(what in note for note in result.notes)] == [
        "local rows", "inbox rows",
    ]  # fmt: skip


@pytest.mark.long
def test_a_range_that_is_purged_while_it_is_read_is_not_judged(spark: Any, trade: Trade) -> None:
    middle_us = trade.at(COUNT // 2)

    def purge(doing: str) -> None:
        if "databases" in doing:
            trade.execute(
                "bank",
                f"UPDATE notify_source SET rows_from = {middle_us // 1000 + 1}",
                f"DELETE FROM half_message WHERE created_at < '{text_of(middle_us)}'",
            )

    result = audited(spark, trade, replace(PLAN, from_us=trade.first_us), purge)
    assert (result.verdict, found(result)) == ("INCONCLUSIVE", {})
    assert "purged while the audit read them" in result.reasons[0]
