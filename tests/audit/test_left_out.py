"""LEFT_OUT: messages that a group was subscribed to and never settled are counted, with who, when and why."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec import to_builtins

from notify.cli.audit_text import show
from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.causes.commands import Commands
from notify.spark.causes.grouping import tell_causes
from notify.spark.explain.explained import explain
from notify.spark.inputs.changes import Changes
from notify.spark.inputs.log_input import LogInput
from notify.spark.report.files import plain, write
from notify.spark.result import Plan, Result
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.meta import MorePolicies, StartSet, Subscribed, TopicDeleted, TopicSet, Unsubscribed, of_plain
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Backlog, Flush, Topic
from tests.audit.audited import PLAN
from tests.audit.leaving import WHO, WHY, Leaving, records_beside, told
from tests.audit.trade import COUNT, WITH_INBOX, Trade, row_of

HOUR_US = 3_600_000_000


def leave(trade: Trade, *, recorded: bool = True) -> Leaving:
    async def plant(leaving: Leaving) -> None:
        await leaving.store.open(leaving.now_us)
        await leaving.plant()
        leaving.now_us += 60_000_000
        await leaving.store.checkpoint()
        await leaving.store.close()

    with records_beside(trade.log) if recorded else nullcontext() as records:
        now_us = trade.at(COUNT)
        leaving = Leaving(LogStore(trade.log, clock=lambda: leaving.now_us), now_us, records)
        asyncio.run(plant(leaving))
    return leaving


def audited(spark: Any, trade: Trade, scratch: Path, plan: Plan = PLAN) -> Result:
    with trade.inputs() as inputs:
        result = Audit(spark, plan, inputs, scratch).run()
        tell_causes(spark, plan, inputs, result, Commands())
        return result


@pytest.mark.long
def test_each_cause_is_told_with_who_when_and_why(
    spark: Any, trade: Trade, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving = leave(trade)
    result = audited(spark, trade, tmp_path / "scratch")
    assert (result.verdict, result.exit_code, result.reasons) == ("PASS", 0, [])
    assert {f.message_id for f in result.found if f.finding == "LEFT_OUT"} == leaving.ids
    assert {f.finding for f in result.found} == {"LEFT_OUT"}
    assert told(result.left_out) == {key: (len(of_it), WHO, WHY) for key, of_it in leaving.left.items()}
    by_cause: dict[tuple[str, str], set[str]] = {}
    for case in result.found:
        assert WHY in case.detail
        for group, left in zip(case.groups, case.left, strict=True):
            by_cause.setdefault((group, left.how), set()).add(case.message_id)
    by_cause["behind", "backlog full"] = by_cause.pop(("behind", "purged"))
    assert by_cause == leaving.left

    # The report's first screen, the JSON and the page name them.
    said = plain(result)
    assert said["counts"]["LEFT_OUT"] == result.counts["LEFT_OUT"] > 0
    assert len(said["left_out"]) == len(leaving.left)
    sentences = [cause["sentence"] for cause in said["causes"] if cause["finding"] == "LEFT_OUT"]
    assert len(sentences) == len(leaving.left)
    assert all(WHO in sentence and WHY in sentence for sentence in sentences)
    page = write(result, tmp_path / "report")
    show(result, page, as_json=False)
    lines = capsys.readouterr().out
    assert all(sentence in lines for sentence in sentences)
    assert "that a group never settled" in lines.splitlines()[-1]
    assert "never settled them" in page.read_text()

    # With --fail-on they fail the audit; a digest first finds the same; so does a range of the time.
    failing = replace(PLAN, fail_on=("LEFT_OUT",), method="digest", from_us=trade.first_us)
    failed = audited(spark, trade, tmp_path / "scratch", failing)
    assert (failed.verdict, failed.exit_code) == ("FINDINGS", 1)
    assert failed.counts["LEFT_OUT"] == result.counts["LEFT_OUT"]
    assert {f.message_id for f in failed.found if f.finding == "LEFT_OUT"} == leaving.ids

    with trade.inputs() as inputs:
        for (group, how), of_it in leaving.left.items():
            explained = explain(inputs, min(of_it), tmp_path / "scratch")
            assert f"LEFT_OUT: {group} never settled it" in explained.sentence, (group, how)
            assert f"by {WHO}: {WHY}" in explained.sentence
            assert explained.exit_code == 0


@pytest.mark.long
def test_a_message_with_an_effect_is_not_left_out(spark: Any, trade: Trade, tmp_path: Path) -> None:
    """A group's acknowledgement was lost, and what it did was not: one message of each cause is in its ledger."""
    leaving = leave(trade)
    proven = {key: min(of_it) for key, of_it in leaving.left.items()}
    rows = ", ".join(f"('{name}', '{group}')" for (group, _), name in proven.items())
    trade.execute(
        WITH_INBOX, "CREATE TABLE ledger (message_id TEXT, consumer_group TEXT)", f"INSERT INTO ledger VALUES {rows}"
    )
    skipped = {"left.reset": leaving.left["moved", "reset"], "left.ended": leaving.left["leaver", "unsubscribed"]}
    rows_of_them = [
        row_of(trade, 0, transaction_id=name.partition(".")[0], mode="outbox", topic=topic, digest=None, key=None)
        for topic, names in skipped.items()
        for name in names
    ]
    engine = sa.create_engine(trade.url("shop"))
    with engine.begin() as connection:  # they have a commit, so that they count for completeness
        connection.execute(half_message.insert(), rows_of_them)
    engine.dispose()
    effects = ((WITH_INBOX, "SELECT message_id, consumer_group FROM ledger"),)
    result = audited(spark, trade, tmp_path / "scratch", replace(PLAN, effects=effects))
    assert {f.message_id for f in result.found if f.finding == "LEFT_OUT"} == leaving.ids - set(proven.values())
    wanted = {key: (len(of_it) - 1, WHO, WHY) for key, of_it in leaving.left.items() if len(of_it) > 1}
    assert told(result.left_out) == wanted
    done = result.completeness
    assert done is not None and (done.due, done.delivered) == (COUNT + 4, COUNT + 2)
    with trade.inputs() as inputs:
        for group, how in proven:
            explained = explain(inputs, proven[group, how], tmp_path / "scratch", effects=effects)
            assert f"LEFT_OUT: {group} never" not in explained.sentence, (group, how, explained.sentence)


@pytest.mark.long
def test_a_cause_that_nobody_recorded_is_told_as_unknown(spark: Any, trade: Trade, tmp_path: Path) -> None:
    leaving = leave(trade, recorded=False)
    result = audited(spark, trade, tmp_path)
    assert (result.verdict, result.exit_code) == ("PASS", 0)
    assert told(result.left_out) == {key: (len(of_it), None, None) for key, of_it in leaving.left.items()}
    assert all("is in no record that was given" in row["why"] for row in result.left_out)


@pytest.mark.long
def test_the_cause_of_a_left_out_message_survives_restarts_and_retention(tmp_path: Path) -> None:
    """Retention has dropped the records of the subscriptions; what ends them says what they were."""
    now_us = 1_800_000_000_000_000
    tagged = Subscription("old", "ended", tags=("a",))

    async def live() -> None:
        nonlocal now_us
        store = LogStore(tmp_path / "log", segment_bytes=4096, clock=lambda: now_us)
        await store.open(now_us)
        for subscription in (tagged, Subscription("old", "deleted"), Subscription("old", "purged")):
            await store.create_topic(Topic(subscription.topic))
            await store.subscribe(subscription, [0])

        async def send() -> None:
            nonlocal now_us
            now_us += 1000
            names = ("ended", "deleted", "purged")
            transactions = [
                NewTransaction(ids.new_id(), "", [NewMessage(name, bytes(500))], committed=True) for name in names
            ]
            await store.put(transactions, now_us)

        for n in range(20):
            await send()
            for name in ("ended", "deleted", "purged"):
                await store.settle("old", name, 0, [(n, 1)], SettleKind.ACK, now_us)
        now_us += 2 * HOUR_US
        store.keep(HOUR_US, 0)
        assert await store.retain(now_us) > 0
        await store.close()
        store = LogStore(tmp_path / "log", segment_bytes=4096, clock=lambda: now_us)
        await store.open(now_us)
        await send()
        await store.unsubscribe("old", "ended")
        await store.delete_topic("deleted")
        store.trim("purged", 0, 21)
        await store.sync()
        await store.checkpoint()
        await store.close()

    asyncio.run(live())
    log = LogInput(tmp_path / "log")
    log.prepare(None, tmp_path / "scratch")
    assert log.segments[0].base > 0
    left = [each for several in log.left.values() for each in several]
    assert {(each.how, each.group, each.end if each.how != "topic deleted" else 21) for each in left} == {
        ("unsubscribed", "old", 21), ("topic deleted", "old", 21), ("purged", "old", 21),
    }  # fmt: skip
    assert next(each for each in left if each.how == "unsubscribed").subscription == tagged


def test_changes_written_by_an_earlier_version_are_dated_by_the_log(tmp_path: Path) -> None:
    """Without ends and subscriptions: what was queued after the subscription's end was not for the group."""
    changes = Changes()
    made = TopicSet(1, "orders", 1, 0, Flush.SYNC)
    records = (
        made, Subscribed(Subscription("a", "orders"), [0]), Subscribed(Subscription("b", "orders"), [3]),
        Unsubscribed("a", "orders"), TopicDeleted("orders"),
    )  # fmt: skip
    for position, record in enumerate(records):
        changes.take(position, 100 * position, of_plain(to_builtins(record)))
    ended, deleted = changes.left({1: "orders"}, {1: 1})
    assert (ended.how, ended.group, ended.holds(5, 299), ended.holds(5, 301)) == ("unsubscribed", "a", True, False)
    assert (deleted.how, deleted.group, deleted.holds(2, 399), deleted.holds(3, 399)) == (
        "topic deleted", "b", False, True,
    )  # fmt: skip


def test_a_backlog_that_is_full_for_long_is_a_few_stretches() -> None:
    """A server trims it every second; other topics are trimmed by hand, and a change of subscriptions is a new one."""
    for policy, stretches in ((MorePolicies(backlog_policy=Backlog.DROP_OLDEST), 2), (MorePolicies(), 13)):
        changes = Changes()
        changes.take(0, 0, TopicSet(1, "orders", 1, 0, Flush.SYNC, policy))
        changes.take(1, 0, Subscribed(Subscription("a", "orders"), [0]))
        for second in range(7200):
            if second == 3300:
                changes.take(2 + second, second * 1_000_000, Subscribed(Subscription("b", "orders"), [1_000_000]))
            changes.take(2 + second, second * 1_000_000, StartSet(1, 0, 10 * (second + 1)))
        left = list(changes.left({1: "orders"}, {1: 1}))
        assert {each.group for each in left} == {"a"}
        assert (len(left), left[0].first, left[-1].end) == (stretches, 0, 72_000)
        assert all(before.end == after.first for before, after in pairwise(left))
