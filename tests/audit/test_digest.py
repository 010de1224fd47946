"""A digest first: it finds what a full audit finds, and reads no more than what may differ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_inbox
from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.spark.audit import Audit
from notify.spark.digest import hashes
from notify.spark.digest.slots import SLOT_US, ranges_of, slot_at, slot_of
from notify.spark.digest.tables import TableDigest, TableSlots, topic_text
from notify.spark.inputs.databases import Database
from notify.spark.inputs.ranges import Span
from notify.spark.result import Plan, Result
from notify.spark.small_table import small_table
from notify.storage.groups import SettleKind
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql.rows import moment_of
from tests.audit.audited import PLAN, audited
from tests.audit.campaign import WITH_EFFECTS, differences, planted
from tests.audit.trade import (
    BODY,
    COUNT,
    TOPICS,
    WITH_INBOX,
    WITHOUT_INBOX,
    Trade,
    effect_of,
    half_of,
    make_trade,
    row_of,
)
from tests.support.databases import DATABASES, empty_database, have_md5
from tools.bench.made_run import made_run

DIGEST = replace(PLAN, method="digest")
STEP_US = 4_000_000
"""The trade's transactions lie in some 18 slots."""


# --- hashes -----------------------------------------------------------------------------------------------------------

NUMBERS = (0, 7, 42, 9999)
DIGESTS = (0, 1, -1, 42, -(1 << 63), (1 << 63) - 1)


@pytest.mark.long
def test_numpy_python_and_spark_make_the_same_hashes(spark: Any) -> None:
    cases = [(ids.new_id(), number, digest) for number in NUMBERS for digest in DIGESTS]
    high = np.array([int.from_bytes(name[:8]) for name, *_ in cases], np.uint64)
    low = np.array([int.from_bytes(name[8:]) for name, *_ in cases], np.uint64)
    numbers = np.array([number for _, number, _ in cases], np.int64)
    digests = np.array([digest for *_, digest in cases], np.int64)
    texts = [f"{ids.to_text(name)}.{number}" for name, number, _ in cases]
    wanted = [hashes.of_text(text) for text in texts]
    assert hashes.of_messages(high, low, numbers).tolist() == wanted
    assert hashes.of_bodies(high, low, numbers, digests).tolist() == [
        hashes.of_text(f"{text}:{digest}") for text, (*_, digest) in zip(texts, cases, strict=True)
    ]
    contents = [(digest, *named) for digest in DIGESTS for named in ((None, None), ("k", None), ("", "red"), ("é", ""))]
    table = small_table(spark, {"digest": pa.int64(), "key": pa.string(), "tag": pa.string()}, contents)
    by_spark = [row[0] for row in table.select(hashes.of_local_contents()).collect()]
    assert by_spark == [hashes.of_contents(*each) for each in contents]


AT_US = 1_790_000_000_000_000 // SLOT_US * SLOT_US
"""The beginning of a slot."""


def local(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "transaction_id": name, "message_no": 0, "producer_group": "orders", "mode": "half", "state": "COMMITTED",
        "shards": "", "topic": "order.placed", "relayed": 1, "created_at": moment_of(AT_US + 5), "digest": None,
        "key": None, "tag": None,
    } | fields  # fmt: skip


def digest_of(database: Database, span: Span | None = None) -> TableSlots:
    digest = TableDigest(database, span)
    with ThreadPoolExecutor(2) as pool:
        for answer in [begun.result() for begun in digest.start(pool)]:
            answer()
    return digest.slots


def made_at(us: int) -> str:
    """An id."""
    return ids.to_text((us // 1000).to_bytes(6) + ids.new_id()[6:])


@pytest.mark.parametrize("kind", DATABASES)
def test_each_database_makes_the_same_digest(kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    first, second, third, later = (made_at(AT_US + us) for us in (0, 1000, SLOT_US - 1000, SLOT_US))
    rows = [
        local(first, digest=-(1 << 63)),
        local(first, message_no=1, digest=17, key="Schlüssel 7", tag="red"),
        local(first, message_no=2, digest=17, key=""),
        local(first, message_no=3, digest=17, tag="red"),
        local(second, topic="order.paid", digest=(1 << 63) - 1, created_at=moment_of(AT_US + 9_000_001)),
        local(third, producer_group="bank"),
        local(later, state="ROLLED_BACK", topic=""),
        local(made_at(AT_US + SLOT_US), state="GARBAGE"),
        local(first.upper(), producer_group="upper"),
        local("no id at all"),
    ]
    effects = [(f"{first}.0", 0), (f"{first}.1", 0), (f"{third}.0", 0), (f"{third}.0", 3), (f"{later}.0", 0)]
    with empty_database(kind, database_urls, tmp_path) as url:
        if kind == "mysql":
            have_md5(url)
        engine = sa.create_engine(url)
        create_tables(engine)
        with engine.begin() as connection:
            connection.execute(half_message.insert(), rows)
            for name, replay in effects:
                effect = {"consumer_group": "points", "message_id": name, "replay": replay}
                connection.execute(notify_inbox.insert().values(effect | {"created_at": moment_of(AT_US)}))
        engine.dispose()
        with contextlib.closing(Database(url, "shop")) as database:
            known = digest_of(database)
            part = digest_of(database, Span(AT_US + SLOT_US + 1, AT_US + SLOT_US + 2))
    slot = slot_at(AT_US)
    placed = hashes.of_text(f"{first}.0:{-(1 << 63)}")
    for number, named in enumerate([("Schlüssel 7", "red"), ("", None), (None, "red")], 1):
        placed ^= hashes.of_text(f"{first}.{number}:{hashes.of_contents(17, *named)}")
    paid = hashes.of_text(f"{second}.0:{(1 << 63) - 1}")
    orders = known.local[slot, "orders"]
    assert orders.hash == (
        hashes.of_text(topic_text(placed, 4, "order.placed")) ^ hashes.of_text(topic_text(paid, 1, "order.paid"))
    )
    assert (orders.committed, orders.digests, orders.odd, orders.tombstones) == (5, 5, 0, 0)
    assert (orders.first_us, orders.last_us) == (AT_US + 5, AT_US + 9_000_001)
    bank = known.local[slot, "bank"]
    assert (bank.committed, bank.digests) == (1, 0)
    assert bank.hash == hashes.of_text(topic_text(hashes.of_text(f"{third}.0"), 1, "order.placed"))
    rest = known.local[slot + 1, "orders"]
    assert (rest.committed, rest.tombstones, rest.odd) == (0, 1, 1)
    assert rest.tombstones_hash == hashes.of_text(f"{later}.0")
    assert known.producer_groups == {"orders", "bank", "upper"}
    assert known.beginnings == {"no id at", first[:8].upper()} or slot_of(first[:8].upper()) is not None
    points = known.effects[slot, "points"]
    assert (points.count, points.replays) == (3, 1)
    assert points.hash == hashes.of_text(f"{first}.0") ^ hashes.of_text(f"{first}.1") ^ hashes.of_text(f"{third}.0")
    assert part.local.keys() == {(slot + 1, "orders")}


def test_ranges_of_slots() -> None:
    assert ranges_of([], 3) == []
    assert [(r.first, r.end) for r in ranges_of([5, 4, 9, 5], 3)] == [(4, 6), (9, 10)]
    many = ranges_of([1, 10, 12, 30, 31, 50], 3)
    assert [(r.first, r.end) for r in many] == [(1, 13), (30, 32), (50, 51)] or len(many) == 3
    assert [(r.first, r.end) for r in ranges_of([1, 10, 100], 1)] == [(1, 101)]


# --- audits -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Trade:
    return make_trade(tmp_path_factory.mktemp("sound") / "trade", step_us=STEP_US)


def run(spark: Any, trade: Trade, plan: Plan = DIGEST) -> Result:
    with trade.inputs() as inputs:
        return Audit(spark, plan, inputs, trade.directory / "scratch").run()


def slots_of(trade: Trade, numbers: Iterator[int] | range | tuple[int, ...]) -> set[int]:
    return {slot_at(trade.at(n)) for n in numbers}


def same(first: Result, second: Result) -> None:
    """Two audits say the same."""
    assert first.counts == second.counts
    assert first.totals == second.totals
    assert sorted(case.key for case in first.found) == sorted(case.key for case in second.found)
    assert (first.verdict, first.reasons) == (second.verdict, second.reasons)
    assert {line.name: line.is_whole for line in first.coverage} == {x.name: x.is_whole for x in second.coverage}


async def go_on(trade: Trade) -> None:
    """Go on with the log as servers may, each in a slot of its own: nothing of this is a finding."""
    now_us = trade.at(COUNT + 90)
    store = LogStore(trade.log, segment_bytes=32 << 10, clock=lambda: now_us)
    await store.open(now_us)
    topic = TOPICS["shop"]

    async def put(n: int, **fields: Any) -> NewTransaction:
        half = msgspec.structs.replace(half_of(trade, n), **fields)
        await store.put([half], trade.at(n))
        return half

    async def settled(offset: int, at_us: int) -> None:
        for group in (WITH_INBOX, WITHOUT_INBOX):
            await store.settle(group, topic, 0, [(offset, 1)], SettleKind.ACK, at_us)

    rolled = [await put(COUNT + 20), await put(COUNT + 40)]  # the second one with a tombstone
    await store.decide([(t.id, t.producer_group, State.ROLLED_BACK) for t in rolled], trade.at(COUNT + 41))
    offset = store.bounds(topic, 0)[1]
    await put(COUNT + 60, committed=True)  # as a relay sends it
    await settled(offset, trade.at(COUNT + 61))
    payload = encode_msgpack(Payload(topic, BODY))
    await store.put([NewTransaction(trade.id(COUNT + 80), "", [NewMessage(topic, payload)], committed=True)], now_us)
    await settled(offset + 1, trade.at(COUNT + 81))
    await store.checkpoint()
    await store.close()


def insert(trade: Trade, service: str, table: sa.Table, row: dict[str, Any]) -> None:
    engine = sa.create_engine(trade.url(service))
    with engine.begin() as connection:
        connection.execute(table.insert(), row)
    engine.dispose()


@pytest.mark.long
def test_nothing_is_read_of_what_is_equal(spark: Any, trade: Trade) -> None:
    """Halves, outcomes and acknowledgements lie in different segments; two producers share each slot."""
    assert len(trade.segments()) > 5
    result = run(spark, trade)
    assert result.slots["read"] == 0 and result.slots["equal"] > 10
    assert (result.verdict, result.totals["committed"]) == ("PASS", COUNT)
    assert sum(count for *_, count in result.latencies["queue_to_ack"]) == COUNT
    assert result.commit_to_ack == {} and any("commit_to_ack" in note for note in result.notes)


@pytest.mark.long
def test_usual_lives_are_equal(spark: Any, trade: Trade) -> None:
    same(run(spark, trade), run(spark, trade, replace(PLAN, method="full")))


@pytest.mark.long
def test_unusual_lives_are_equal_too(spark: Any, tmp_path: Path) -> None:
    trade = make_trade(tmp_path / "trade", step_us=STEP_US, ago_us=100 * STEP_US)
    asyncio.run(go_on(trade))
    insert(trade, "shop", half_message, row_of(trade, COUNT + 40, state="ROLLED_BACK", topic="", digest=None))
    insert(trade, "shop", half_message, row_of(trade, COUNT + 60))
    for n in (60, 80):
        insert(trade, WITH_INBOX, notify_inbox, effect_of(trade, COUNT + n))
    trade.execute("bank", "UPDATE half_message SET digest = NULL")  # rows of an older SDK
    result = run(spark, trade)
    assert (result.verdict, result.slots["read"]) == ("PASS", 0)
    same(result, run(spark, trade, replace(PLAN, method="full")))


@pytest.mark.long
def test_only_slots_that_may_differ_are_read(spark: Any, trade: Trade) -> None:
    """A replay, and digests of some rows, are no findings; a lost message is one."""
    insert(trade, WITH_INBOX, notify_inbox, effect_of(trade, 20, replay=1))
    trade.execute("shop", f"UPDATE half_message SET digest = NULL WHERE transaction_id = '{trade.name(80)}'")
    lost = row_of(trade, COUNT)
    insert(trade, "shop", half_message, lost)
    result = run(spark, trade)
    assert [case.message_id for case in result.found] == [trade.message(COUNT)]
    assert result.slots["read"] == len(slots_of(trade, (20, 80, COUNT)))
    same(result, run(spark, trade, replace(PLAN, method="full")))


@pytest.mark.long
def test_planted_faults_are_found_from_a_digest(spark: Any, database_urls: dict[str, str], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        made = made_run(tmp_path, url, 2000, segment_bytes=1 << 18, step_us=1_000_000)
        clean = audited(spark, url, made.log, tmp_path / "clean", DIGEST)
        assert (clean.verdict, clean.slots["read"]) == ("PASS", 0)
        wanted = planted(made, url, tmp_path / "faulty", 2)
        plan = replace(WITH_EFFECTS, method="digest")
        faulty = audited(spark, url, tmp_path / "faulty", tmp_path / "scratch", plan)
    assert differences(faulty, wanted) == []
    assert 0 < faulty.slots["read"] < faulty.slots["compared"]


@pytest.mark.long
def test_an_audit_survives_a_digest_that_fails(spark: Any, trade: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(digest: TableDigest, pool: ThreadPoolExecutor) -> Any:
        raise OperationalError("SELECT", {}, Exception("function bit_xor(bigint) does not exist"))

    monkeypatch.setattr(TableDigest, "start", refuse)
    result = run(spark, trade)
    assert (result.verdict, result.slots, result.totals["committed"]) == ("PASS", {}, COUNT)
    assert [note for note in result.notes if "bit_xor" in note], result.notes
