"""A segment's columns agree with the store that wrote it."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.protocol.withdrawal import Wanted
from notify.spark.inputs import log_input
from notify.spark.inputs.columns import ATTEMPTED, TAKES_NO_PLACE, WITHDRAWN, name_hash
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.log_source import NotifyLogSource
from notify.storage import crash_point
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.entry import ID_AT, EntryKind
from notify.storage.log.format import FRAME_HEADER, FRAME_HEADER_SIZE, SEGMENT_HEADER_SIZE
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State, StoredMessage
from notify.storage.topics import Topic

T0 = 1_800_000_000_000_000
SECOND = 1_000_000


def transaction(name: bytes, topics: list[str], **options: Any) -> NewTransaction:
    messages = [NewMessage(t, encode_msgpack(Payload(t, b"x" * 50, "k")), "k", **options) for t in topics]
    return NewTransaction(name, "shop", messages, "source-1")


async def lived(directory: Path) -> dict[str, bytes]:
    """A log of several segments with every kind of record."""
    store = LogStore(directory, segment_bytes=8192)
    await store.open(T0)
    for name in ("a", "b"):
        await store.create_topic(Topic(name))
        await store.subscribe(Subscription("g", name), [0])
    made = {name: ids.new_id() for name in ("plain", "rolled", "doubt", "delayed", "dead", "tried", "published")}
    await store.put([transaction(made["plain"], ["a", "b"])], T0)
    await store.put([transaction(made["rolled"], ["a", "a", "b"])], T0)
    await store.put([transaction(made["doubt"], ["a"])], T0)
    await store.put([transaction(made["delayed"], ["b"], delay_us=5 * SECOND)], T0)
    await store.decide([(made["plain"], "shop", State.COMMITTED)], T0 + 1)
    await store.decide([(made["delayed"], "shop", State.COMMITTED)], T0 + 2)
    await store.settle("g", "a", 0, [(0, 1)], SettleKind.ACK, T0 + 3)
    for _ in range(60):  # earlier segments; all else happens after them
        filler = ids.new_id()
        await store.put([transaction(filler, ["a", "b"])], T0 + 4)
        await store.decide([(filler, "shop", State.COMMITTED)], T0 + 4)
    await store.decide([(made["rolled"], "shop", State.ROLLED_BACK)], T0 + 5)
    await store.settle("g", "b", 0, [(0, 1)], SettleKind.ACK, T0 + 6)
    store.release_due(T0 + 6 * SECOND, 100)
    published = NewTransaction(
        made["published"], "", [NewMessage("b", encode_msgpack(Payload("b", b"p")))], committed=True
    )
    await store.put([published, transaction(made["dead"], ["a"]), transaction(made["tried"], ["a"])], T0 + 7)
    await store.decide([(made["dead"], "shop", State.COMMITTED), (made["tried"], "shop", State.COMMITTED)], T0 + 8)
    end = store.bounds("a", 0)[1]
    dead = store.read("a", 0, end - 2, 1, 1 << 20)[0]
    assert isinstance(dead, StoredMessage)
    store.dead_letter_soon("g", [(dead, dead.payload)], T0 + 9)
    await store.sync()
    store.attempted("g", "a", 0, [(end - 1, 2, 0)])
    await store.sync()
    await store.close()
    return made


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    directory = tmp_path_factory.mktemp("scanned") / "log"
    return directory, asyncio.run(lived(directory))


@pytest.fixture(scope="module")
def read(log: tuple[Path, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> LogInput:
    log_input = LogInput(log[0])
    log_input.prepare(None, tmp_path_factory.mktemp("copies"))
    assert len(log_input.facts) > 3 and not log_input.problems
    return log_input


def test_a_transactions_messages_are_rows_with_their_places(log: Any, read: LogInput) -> None:
    rows = {m["no"]: m for m in read.entries_of(log[1]["plain"])["messages"]}
    assert rows.keys() == {0, 1}
    for m in rows.values():
        assert (m["half_us"], m["outcome"], m["queued_us"], m["offset"]) == (T0, 1, T0 + 1, 0)
        assert read.catalog.producer_groups[m["producer_group"]] == "shop"
    assert [read.catalog.topics[rows[n]["topic"]] for n in (0, 1)] == ["a", "b"]


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_dead_letter_is_not_the_place_of_a_half_whose_outcome_is_damaged(
    log: Any, tmp_path: Path, is_readable: bool
) -> None:
    """A damaged frame is read after all others, or not at all: the half was given the offset of its dead letter."""
    shutil.copytree(log[0], tmp_path / "log")
    segment, start, end = frame_with(tmp_path / "log", log[1]["dead"], EntryKind.QUEUE)
    data = bytearray(segment.read_bytes())
    wrong = slice(start, start + 8) if is_readable else slice(start, end)
    data[wrong] = bytes(wrong.stop - wrong.start)
    segment.write_bytes(data)
    harmed = LogInput(tmp_path / "log")
    harmed.prepare(None, tmp_path / "scratch")
    rows = harmed.entries_of(log[1]["dead"])["messages"]
    places = {(harmed.catalog.topics[m["topic"]], m["offset"]) for m in rows}
    assert places == {("a", None), ("dead-letter.g", 0)} | ({("a", 61)} if is_readable else set())


def frame_with(log: Path, name: bytes, kind: EntryKind) -> tuple[Path, int, int]:
    """The segment, beginning and end of the first frame with such an entry of a transaction."""
    for segment in sorted(log.glob("*.log")):
        data, at = segment.read_bytes(), SEGMENT_HEADER_SIZE
        while at + FRAME_HEADER_SIZE <= len(data):
            end = at + FRAME_HEADER_SIZE + FRAME_HEADER.unpack_from(data, at)[1]
            place = data.find(name, at, end)
            if place > 0 and data[place - ID_AT] == kind:
                return segment, at, end
            at = end
    raise AssertionError("there is no such frame")


def test_delayed_and_undecided_and_published(log: Any, read: LogInput) -> None:
    delayed = read.entries_of(log[1]["delayed"])["messages"]
    assert {m["due_us"] for m in delayed} - {None} == {T0 + 2 + 5 * SECOND}
    assert [m["queued_us"] for m in delayed if m["queued_us"]] == [T0 + 6 * SECOND]
    (doubt,) = read.entries_of(log[1]["doubt"])["messages"]
    assert (doubt["half_us"], doubt["outcome"], doubt["queued_us"]) == (T0, 0, None)
    (published,) = read.entries_of(log[1]["published"])["messages"]
    assert published["producer_group"] == 0 and published["outcome"] == 1


def test_a_scan_tells_withdrawn_messages_from_their_withdrawals(tmp_path: Path) -> None:
    """A withdrawn message keeps its due time; a cancellation takes no place; a replacement in time takes one."""

    async def write() -> list[bytes]:
        store = LogStore(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("a"))
        targets = [transaction(ids.new_id(), ["a"], delay_us=5 * SECOND) for _ in range(2)]
        by: list[NewTransaction] = []
        for target, replaces in zip(targets, (False, True), strict=True):
            message = NewMessage("a", b"\x82\xa5topic\xa1a\xa4body\xc4\x00", acts=Wanted(target.id, 0, replaces))
            by.append(NewTransaction(ids.new_id(), "shop", [message]))
        await store.put([*targets, *by], T0)
        await store.decide([(t.id, "shop", State.COMMITTED) for t in (*targets, *by)], T0 + 1)
        await store.close()
        return [t.id for t in (*targets, *by)]

    made = asyncio.run(write())
    read = LogInput(tmp_path / "log")
    read.prepare(None, tmp_path / "copies")
    rows = [row for (row,) in (read.entries_of(name)["messages"] for name in made)]
    assert [row["withdrawn"] for row in rows] == [WITHDRAWN, WITHDRAWN, TAKES_NO_PLACE, None]
    assert [row["due_us"] for row in rows] == [T0 + 1 + 5 * SECOND] * 2 + [None] * 2
    assert [row["outcome"] for row in rows] == [1] * 4 and [row["offset"] for row in rows] == [None, None, None, 0]


def test_who_settled_what_in_which_segment(log: Any, read: LogInput) -> None:
    acks = read.entries_of(log[1]["plain"])["acks"]
    assert [(a["group"], a["kind"]) for a in acks] == [("g", SettleKind.ACK)] * 2
    in_other = [a for a in acks if a["is_loose"]]
    assert len(in_other) == 1 and in_other[0]["id"] is None  # settled in a later segment than it was queued in
    dead = read.entries_of(log[1]["dead"])
    assert [a["kind"] for a in dead["acks"]] == [SettleKind.DEAD_LETTER]
    assert {read.catalog.topics[m["topic"]] for m in dead["messages"]} == {"a", "dead-letter.g"}
    tried = read.entries_of(log[1]["tried"])["acks"]
    assert [(a["kind"], a["attempts"]) for a in tried] == [(ATTEMPTED, 2)]


@pytest.mark.long
def test_a_rollback_in_another_segment_is_spread_over_all_messages(spark: Any, log: Any, read: LogInput) -> None:
    from notify.spark.judge.message_rows import Groups

    groups = Groups(read.groups())
    messages = read.messages(spark, groups)
    assert messages is not None
    rows = messages.where(messages["id"] == bytearray(log[1]["rolled"])).collect()
    assert {row["no"] for row in rows if row["outcome"] == 2} == {0, 1, 2}
    acks = read.acks(spark)
    assert acks is not None
    settled = acks.where(acks["id"] == bytearray(log[1]["plain"])).collect()
    assert sorted((row["no"], row["consumer_group"]) for row in settled) == [(0, name_hash("g")), (1, name_hash("g"))]


def rows_of(path: Path, **options: str) -> list[dict[str, Any]]:
    """The rows of the data source with these options, read without Spark."""
    source = NotifyLogSource({"path": str(path), **options})
    names = [column.split()[0] for column in source.schema().split(", ")]
    reader = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert all(list(row) == names for row in rows)
    return rows


def test_the_source_reads_the_same_by_index_and_by_log(log: Any) -> None:
    columns = "id,no,queued_us,topic,offset"
    by_index = rows_of(log[0], table="queue", columns=columns)
    by_log = rows_of(log[0], table="queue", columns=columns, **{"from": "log"})
    assert sorted(by_index, key=repr) == sorted(by_log, key=repr) and len(by_index) > 120
    halves = rows_of(log[0], table="halves")
    assert len([row for row in halves if row["half_us"] is not None]) == 2 + 3 + 1 + 1 + 120 + 2
    assert len(rows_of(log[0], table="acks")) == 4


@pytest.mark.long
def test_the_source_is_read_by_spark(spark: Any, log: Any) -> None:
    spark.dataSource.register(NotifyLogSource)
    queue = spark.read.format("notify_log").options(path=str(log[0]), table="queue").load()
    late = f"queued_us > {T0 + SECOND}"  # earlier segments are skipped
    expected = [row for row in rows_of(log[0], table="queue") if row["queued_us"] > T0 + SECOND]
    assert [row.asDict() for row in queue.where(late).collect()] == expected and len(expected) == 1


def test_bad_options_say_what_there_is(log: Any) -> None:
    with pytest.raises(InvalidRequest, match="use one of messages"):
        rows_of(log[0], table="nonsense")
    with pytest.raises(InvalidRequest, match="has no colour"):
        rows_of(log[0], columns="id,colour")
    with pytest.raises(InvalidRequest, match="has no log"):
        rows_of(log[0].parent / "nowhere")


@pytest.mark.long
def test_segments_are_copied_by_tasks_of_spark(
    spark: Any, log: Any, read: LogInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_input, "COPIED_HERE_BYTES", 0)
    by_tasks = LogInput(log[0])
    by_tasks.prepare(spark, tmp_path)
    assert by_tasks.facts == read.facts and not by_tasks.problems
    assert by_tasks.entries_of(log[1]["plain"]) == read.entries_of(log[1]["plain"])


@pytest.mark.long
def test_segments_are_compared_by_tasks_of_spark(
    spark: Any, log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "log"
    shutil.copytree(log[0], directory)
    first = LogInput(directory)
    first.prepare(None, tmp_path)
    turn_last_byte(directory, first)
    monkeypatch.setattr(log_input, "COMPARED_HERE_BYTES", 0)
    rotted = LogInput(directory)
    rotted.prepare(spark, tmp_path)
    assert rotted.facts[-1] != first.facts[-1] and rotted.facts[:-1] == first.facts[:-1]


def turn_last_byte(directory: Path, read: LogInput) -> None:
    """Let a byte of the last frame rot, which changes neither the file's size nor its time."""
    segment = sorted(directory.glob("*.log"))[-1]
    state = segment.stat()
    data = bytearray(segment.read_bytes())
    data[read.facts[-1].end - read.facts[-1].base - 1] ^= 1
    segment.write_bytes(data)
    os.utime(segment, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_the_last_segment_is_copied_once_if_nobody_writes_to_it(log: Any, tmp_path: Path) -> None:
    directory = tmp_path / "log"
    shutil.copytree(log[0], directory)
    first = LogInput(directory)
    first.prepare(None, tmp_path)
    copies = list(tmp_path.glob("*/*/messages.parquet"))
    written = {place: place.stat().st_mtime_ns for place in copies}
    LogInput(directory).prepare(None, tmp_path)
    assert {place: place.stat().st_mtime_ns for place in copies} == written
    turn_last_byte(directory, first)
    rotted = LogInput(directory)
    rotted.prepare(None, tmp_path)
    assert rotted.facts[-1] != first.facts[-1] and rotted.facts[:-1] == first.facts[:-1]


@pytest.mark.long
def test_segments_with_the_same_groups_are_one_branch_of_a_plan(spark: Any, tmp_path: Path) -> None:
    from notify.spark.judge.message_rows import Groups

    async def live() -> None:
        store = LogStore(tmp_path / "log", segment_bytes=8192)
        await store.open(T0)
        await store.create_topic(Topic("a"))
        names = ["b@1", "z", "c"]
        for name in names:
            await store.subscribe(Subscription(name, "a", mode="broadcast" if "@" in name else "shared"), [0])
        for n in range(120):
            filler = ids.new_id()
            await store.put([transaction(filler, ["a"])], T0 + n)
            await store.decide([(filler, "shop", State.COMMITTED)], T0 + n)
            for name in names[n % 3 :] + names[: n % 3]:
                if name != "c" or n % 2:
                    await store.settle(name, "a", 0, [(n, 1)], SettleKind.ACK, T0 + n)
        await store.close()

    asyncio.run(live())
    scanned = LogInput(tmp_path / "log")
    scanned.prepare(None, tmp_path)
    assert len(scanned.facts) > 3 and {f.masked for f in scanned.facts} == {("c", "z")}
    groups = Groups(["c", "z"])
    messages = scanned.messages(spark, groups)
    assert messages is not None
    masks = {row["offset"]: row["acked0"] or 0 for row in messages.where("offset IS NOT NULL").collect()}
    whole = {n: 0b11 if n % 2 else 0b10 for n in range(120)}
    assert all(masks[n] | whole[n] == whole[n] for n in whole)
    assert len([n for n in whole if masks[n] == whole[n]]) > 100  # others were acknowledged in the next segment
    acks = scanned.acks(spark)
    assert acks is not None
    settled = {(row["consumer_group"], row["offset"]) for row in acks.collect()}
    assert settled == {(name_hash(g), n) for g in ("z", "b@1", "c") for n in range(120) if g != "c" or n % 2}


def test_a_copy_whose_removal_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts go first: a copy with facts and without tables would fail each audit from then on."""
    asyncio.run(lived(tmp_path / "log"))

    def prepared() -> LogInput:
        log = LogInput(tmp_path / "log")
        log.prepare(None, tmp_path / "scratch")
        return log

    messages = prepared().count_from(None)
    path = sorted((tmp_path / "log").glob("*.log"))[0]
    before = path.stat()
    path.touch()  # its copy is of an earlier time, and removed

    class Killed(BaseException):
        """Stands for the death of the process."""

    def die(name: str) -> None:
        if name == "copy.forgetting":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(crash_point, "reached", die)
        with pytest.raises(Killed):
            prepared()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the copy would be the right one again
    assert prepared().count_from(None) == messages
    copies = [entry for entry in (tmp_path / "scratch").glob("*/*") if not (entry / "facts.json").exists()]
    assert copies == []
