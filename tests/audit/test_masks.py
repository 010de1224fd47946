"""Groups that subscribe one after the other: segments with different groups are one part of a plan."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.masks import lookups
from notify.spark.judge.message_rows import BITS, Groups
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.topics import Topic

T0 = 1_800_000_000_000_000
GROUPS = 200
NAMES = [f"g{n:03d}" for n in range(GROUPS)]
EARLIER = 3
"""So many groups that are there acknowledge each message, and each group that comes: in all segments others do."""


def settlers(n: int) -> list[str]:
    """The groups that acknowledge message n at once; the last message has all of them, more than masks have bits."""
    return NAMES if n == GROUPS - 1 else NAMES[max(0, n - EARLIER) : n + 1]


async def _live(directory: Path) -> None:
    store = LogStore(directory, segment_bytes=16 << 10)
    await store.open(T0)
    await store.create_topic(Topic("a"))
    for n, name in enumerate(NAMES):
        await store.subscribe(Subscription(name, "a"), [0])
        one = NewTransaction(ids.new_id(), "shop", [NewMessage("a", encode_msgpack(Payload("a", b"x" * 50)))], "s")
        await store.put([one], T0 + n)
        await store.decide([(one.id, "shop", State.COMMITTED)], T0 + n)
        acks = [store.settle(group, "a", 0, [(n, 1)], SettleKind.ACK, T0 + n) for group in settlers(n)]
        await asyncio.gather(*acks)
    await store.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> LogInput:
    directory = tmp_path_factory.mktemp("subscribed")
    asyncio.run(_live(directory / "log"))
    made = LogInput(directory / "log")
    made.prepare(None, directory)
    assert len({facts.masked for facts in made.facts}) > 5, "each segment has other groups"
    return made


def relations(rows: Any) -> int:
    """How many tables a plan reads."""
    return len(re.findall(r"\bRelation \[", rows._jdf.queryExecution().analyzed().toString()))


def masked(groups: Groups, row: Any, mask: str) -> set[str]:
    return set(groups.of([row[f"{mask}{b}"] for b in range(groups.blocks)]))


@pytest.mark.long
@pytest.mark.parametrize("names", [NAMES, NAMES[50:57]])
def test_segments_with_different_groups_are_read_by_one_plan(spark: Any, log: LogInput, names: list[str]) -> None:
    """Whatever was acknowledged is in the masks, or is an acknowledgement of its own."""
    groups = Groups(names)
    stored, loose, acks = log.stored(spark, groups), log.acks(spark, loose_only=True), log.acks(spark)
    assert stored is not None and loose is not None and acks is not None
    alone = log.acks(spark, with_ids=False)
    assert (relations(stored), relations(alone), relations(loose)) == (1, 1, 3), "ids come from one table of messages"
    assert "groups" not in stored.columns
    known: dict[int, set[str]] = {}
    for row in stored.where("offset IS NOT NULL").collect():
        assert masked(groups, row, "acked") == masked(groups, row, "settled") and not masked(groups, row, "attempted")
        known[row["offset"]] = masked(groups, row, "acked")
    by_masks = sum(map(len, known.values()))
    by_hash = {name_hash(name): name for name in NAMES}
    for row in loose.where(loose["consumer_group"].isin([name_hash(name) for name in names])).collect():
        known[row["offset"]].add(by_hash[row["consumer_group"]])
    assert known == {n: set(settlers(n)) & set(names) for n in range(GROUPS)}
    assert by_masks > 2 * len(names), "masks have most of what is not in the last message"
    everything = {(row["offset"], by_hash[row["consumer_group"]]) for row in acks.collect()}
    assert everything == {(n, group) for n in range(GROUPS) for group in settlers(n)}


@pytest.mark.long
def test_the_history_of_a_message_names_its_groups(log: LogInput) -> None:
    (row,) = log.copies.read("messages", log.segments[0], filters=[("offset", "=", 2)]).to_pylist()
    entries = log.entries_of(row["id"])
    assert {ack["group"] for ack in entries["acks"]} == set(settlers(2))


def expected(names: Iterable[str], groups: Groups, mask: int) -> list[int]:
    """The blocks of a segment's mask, bit for bit."""
    there = [name for n, name in enumerate(names) if mask >> n & 1]
    return [groups.mask(there, block) for block in range(groups.blocks)]


@pytest.mark.parametrize("masks", [(0,), (1, 2, 4, 8, 16), (0b10110, (1 << BITS) - 1), (0x2AAAAAAAAAAAAAAA,)])
def test_pieces_of_a_mask_are_looked_up(masks: tuple[int, ...]) -> None:
    groups, names = Groups(NAMES), tuple(NAMES[100 : 100 + BITS])
    tables = lookups(names, groups)
    for mask in masks:
        found = [0] * groups.blocks
        for block, table in enumerate(tables):
            for piece in range(len(table) // 16):
                found[block] |= int(table[16 * piece + (mask >> 4 * piece & 15)])
        assert found == expected(names, groups, mask)
