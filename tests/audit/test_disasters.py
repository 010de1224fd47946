"""Disasters: tables wiped, segments missing, inputs swapped, doubled or foreign. The audit names them; it never passes.

Everything is harmed by its own means: SQL, and bytes of files.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from notify.errors import InvalidRequest
from notify.spark.audit import Audit
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs, Plan, Result
from notify.storage.log.format import FRAME_HEADER_SIZE, SEGMENT_HEADER_SIZE, crc32c
from notify.storage.log.store import LogStore
from tests.audit.audited import PLAN
from tests.audit.disasters import DISASTERS, HARMLESS, Disaster, complaints_of_harmless
from tests.audit.trade import COUNT, SERVICES, WITH_INBOX, Trade, make_trade
from tests.audit.world import World


def audited(spark: Any, trade: Trade, plan: Plan = PLAN, services: Sequence[str] = SERVICES) -> Result:
    with trade.inputs(services) as inputs:
        return Audit(spark, plan, inputs, trade.directory / "scratch").run()


def found(result: Result) -> dict[str, int]:
    """How often each class was found, without what is no finding."""
    return {name: count for name, count in result.counts.items() if count and name != "PENDING"}


def read(trade: Trade) -> LogInput:
    """The log, without Spark."""
    log = LogInput(trade.log)
    log.prepare(None, trade.directory / "scratch")
    return log


def begun(inputs: Inputs, scratch: Path, plan: Plan = PLAN) -> Result:
    """An audit's view of its inputs before it judges messages; it needs no Spark for that."""
    audit = Audit(cast("Any", None), plan, inputs, scratch)
    audit.begin()
    return audit.result


TOLD_FROM_MESSAGES = ("stale", "group points")
"""The beginning of these reasons is known only once messages were read."""
SHORT = {
    ("swapped", "two segments of a log"), ("swapped", "the first segments of two servers"),
    ("swapped", "segments of two servers"), ("foreign", "a sender's database instead"),
    ("missing", "a sender's database"), ("missing", "the first segment"), ("missing", "a middle segment"),
    ("truncated", "a middle segment"), ("wiped", "local rows of a database"),
}  # fmt: skip
"""Those that each run goes through; `make audit-faults` audits after every one, three times."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Trade:
    return make_trade(tmp_path_factory.mktemp("other") / "other", 2, body=b"y" * 150)


@pytest.mark.parametrize(
    "disaster",
    [
        pytest.param(d, marks=() if (d.kind, d.name) in SHORT else pytest.mark.long, id=f"{d.kind} {d.name}")
        for d in DISASTERS
        if d.reason and not d.reason.startswith(TOLD_FROM_MESSAGES)
    ],
)
def test_a_disaster_is_named_before_messages_are_read(
    trade: Trade, other: Trade, tmp_path: Path, disaster: Disaster
) -> None:
    world = World(trade, other, {service: trade.url(service) for service in SERVICES}, [trade.log])
    disaster.harm(world)
    try:
        with world.inputs() as inputs:
            reasons = begun(inputs, tmp_path / "scratch").reasons
    except InvalidRequest as refusal:
        reasons = [str(refusal)]
    assert any(re.search(disaster.reason, reason) for reason in reasons), reasons


@pytest.mark.long
def test_a_harmless_disaster_passes(spark: Any, trade: Trade, tmp_path: Path) -> None:
    world = World(trade, trade, {service: trade.url(service) for service in SERVICES}, [trade.log])
    results: list[Result] = []

    def all_at_once(world: World) -> None:
        for _, harm in HARMLESS:
            harm(world)

    def audit(inputs: Inputs) -> Result:
        results.append(Audit(spark, PLAN, inputs, tmp_path / "scratch").run())
        return results[0]

    assert not complaints_of_harmless(all_at_once, world, audit)
    (result,) = results
    assert (result.verdict, result.exit_code, result.reasons) == ("PASS", 0, [])
    # A clock that is ahead keeps the last five minutes from being judged yet.
    assert 0 < result.totals["committed"] == result.totals["queued"]


# --- databases ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_inbox_and_local_rows_that_were_wiped(spark: Any, trade: Trade) -> None:
    """Each has its reason; `make audit-faults` has each alone."""
    trade.execute(WITH_INBOX, "DELETE FROM notify_inbox")
    trade.execute("bank", "DELETE FROM half_message")
    result = audited(spark, trade)
    assert (result.verdict, found(result)) == ("INCONCLUSIVE", {})
    assert any("points" in reason and "inbox" in reason for reason in result.reasons), result.reasons
    assert any("bank" in reason and "half_message" in reason for reason in result.reasons), result.reasons


@pytest.mark.long
def test_the_databases_of_an_inbox_and_of_a_sender_were_not_given(spark: Any, trade: Trade) -> None:
    """Each has its reason."""
    result = audited(spark, trade, services=["shop"])
    assert (result.verdict, found(result)) == ("INCONCLUSIVE", {})
    for wanted in ("points", trade.source("bank")):
        assert any(wanted in reason for reason in result.reasons), result.reasons


def test_a_database_that_is_given_twice(trade: Trade, tmp_path: Path) -> None:
    """Or a clone of it: every effect would be there twice."""
    shutil.copy(trade.directory / "points.db", trade.directory / "clone.db")
    with trade.inputs([*SERVICES, "clone"]) as inputs, pytest.raises(InvalidRequest, match="same source id"):
        begun(inputs, tmp_path / "scratch")


# --- logs that are not whole ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_messages_that_retention_dropped_are_not_lost(spark: Any, trade: Trade) -> None:
    """The log's checkpoint records it."""

    async def retain() -> None:
        store = LogStore(trade.log, retention_us=1, clock=lambda: trade.at(COUNT))
        await store.open(trade.at(COUNT))
        assert await store.retain(trade.at(COUNT // 2)) > 1
        await store.close()

    asyncio.run(retain())
    result = audited(spark, trade)
    assert (result.verdict, result.reasons, found(result)) == ("PASS", [], {})
    assert 0 < result.totals["committed"] < COUNT
    (whole,) = [line for line in result.coverage if line.kind == "segments"]
    assert whole.is_whole and "retention dropped" in whole.expected
    trade.segments()[0].unlink()
    assert "first segments are missing" in next(iter(read(trade).unread(0)))


def removed(segments: list[Path]) -> None:
    segments[2].unlink()


def garbled(segments: list[Path]) -> None:
    data = bytearray(segments[4].read_bytes())
    for at in range(SEGMENT_HEADER_SIZE, len(data), 97):
        data[at] ^= 0x55
    segments[4].write_bytes(data)


def removed_and_garbled(segments: list[Path]) -> None:
    removed(segments)
    garbled(segments)


def of_yesterday(segments: list[Path]) -> None:
    """An old copy: the segment as it was before most of it was written, with the room that was reserved for it."""
    data = segments[2].read_bytes()
    at = SEGMENT_HEADER_SIZE
    while at < len(data) // 3:
        at += FRAME_HEADER_SIZE + struct.unpack_from("<I", data, at + 4)[0]
    segments[2].write_bytes(data[:at] + bytes(len(data) - at))


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (removed_and_garbled, ("are missing", "cannot be read")),
        pytest.param(of_yesterday, ("cannot be read",), marks=pytest.mark.long),
    ],
)
def test_a_segment_in_the_middle(
    spark: Any, trade: Trade, harm: Callable[[list[Path]], None], said: Sequence[str]
) -> None:
    """Messages that were in it cannot be judged: none of them is called LOST."""
    segments = trade.segments()
    assert len(segments) > 5
    harm(segments)
    result = audited(spark, trade)
    assert result.verdict != "PASS"
    assert all(any(text in reason for reason in result.reasons) for text in said), result.reasons
    assert found(result).keys() == {"CORRUPT"}
    assert result.counts["PENDING"] > 20


def frame_of(data: bytes, number: int) -> int:
    """Where a segment's frame of a number begins."""
    at = SEGMENT_HEADER_SIZE
    for _ in range(number):
        at += FRAME_HEADER_SIZE + struct.unpack_from("<I", data, at + 4)[0]
    return at


def test_a_frame_whose_header_is_garbled(trade: Trade, tmp_path: Path) -> None:
    """Its time is, too: an audit of a range finds it by the time of the frames around it."""
    path = trade.segments()[2]
    data = bytearray(path.read_bytes())
    at = frame_of(data, 5)
    data[at + 12 : at + FRAME_HEADER_SIZE] = b"\xa5" * (FRAME_HEADER_SIZE - 12)
    path.write_bytes(data)
    (broken,) = read(trade).broken()
    assert trade.first_us <= broken["time_us"] < trade.at(COUNT)
    with trade.inputs() as inputs:
        later = begun(inputs, tmp_path / "scratch", replace(PLAN, from_us=trade.at(COUNT - 20)))
    assert any("cannot be read" in reason for reason in later.reasons)  # messages of that time may have been in it


def test_an_old_gap_does_not_affect_the_verdict_on_today(trade: Trade) -> None:
    removed(trade.segments())
    log = read(trade)
    (hole,) = log.holes
    assert trade.first_us < hole.from_us <= hole.to_us < trade.at(COUNT)
    assert any("are missing" in part for part in log.unread(hole.to_us))
    assert list(log.unread(hole.to_us + 1)) == []


def test_a_payload_that_differs_from_its_own_checksum(trade: Trade) -> None:
    """A faulty server wrote it: the frame's checksum is right."""
    path = trade.segments()[1]
    data = bytearray(path.read_bytes())
    place = data.index(b"x" * 200)
    data[place] ^= 1
    at = max(frame_of(data, n) for n in range(20) if frame_of(data, n) < place)
    length = struct.unpack_from("<I", data, at + 4)[0]
    crc = crc32c(bytes(data[at + 4 : at + 8]) + bytes(data[at + 12 : at + FRAME_HEADER_SIZE + length]))
    data[at + 8 : at + 12] = crc.to_bytes(4, "little")
    path.write_bytes(data)
    (broken,) = read(trade).broken()
    assert broken["id"] in {trade.name(n) for n in range(COUNT)} and "checksum" in broken["detail"]


def test_a_byte_that_rots_beside_a_copy(trade: Trade) -> None:
    """The file's size and time stay: the copy does not hide it."""
    assert not list(read(trade).broken())
    path = trade.segments()[1]
    state = path.stat()
    data = bytearray(path.read_bytes())
    data[data.index(b"x" * 200)] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert len(list(read(trade).broken())) == 1


# --- inputs that do not belong together -----------------------------------------------------------------------------


def test_the_log_of_another_server_is_refused(trade: Trade, other: Trade, tmp_path: Path) -> None:
    with trade.inputs(logs=[other.log]) as inputs, pytest.raises(InvalidRequest, match="do not belong together"):
        begun(inputs, tmp_path / "scratch")


def test_the_same_log_given_twice_is_refused(trade: Trade, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trade.log, copy)
    for again in (trade.log, copy):
        with trade.inputs(logs=[trade.log, again]) as inputs, pytest.raises(InvalidRequest, match="same log"):
            begun(inputs, tmp_path / "scratch")
