"""Golden bytes: the log on users' disks. A change here is a new format version, with a reader for the old one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_HEAD, ENTRY_TAIL
from notify.storage.log.format import FRAME_HEADER, crc32c, frame, frame_is_sound, read_segment_header, segment_header
from notify.storage.log.records import ATTEMPTS, Held, Progressed, RecordType, encode, progressed
from notify.storage.log.recovery import walk
from notify.storage.log.segments import Segments
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.topics import Topic

ID = bytes.fromhex("018f0e4c3a5b7c6d8e9fa0b1c2d3e4f5")

SEGMENT = (
    "4e54465953454731" "01000000" "00000000" "0010000000000000" "40420f0000000000" "{crc}" + "00" * 28
)  # fmt: skip


def test_a_segment_header_has_these_bytes() -> None:
    data = segment_header(4096, 1_000_000)
    assert data.hex() == SEGMENT.replace("{crc}", data[32:36].hex())
    assert data[32:36].hex() == "e6248db8"
    assert read_segment_header(data) == (4096, 1_000_000)


@pytest.mark.parametrize("at", range(36))
def test_a_damaged_segment_header_is_noticed(at: int) -> None:
    data = bytearray(segment_header(4096, 1_000_000))
    data[at] ^= 1
    with pytest.raises(ValueError, match=r"magic|version|checksum"):
        read_segment_header(bytes(data))


def test_a_frame_has_these_bytes() -> None:
    data = frame(b"abc", 1, 64, 64, 5)
    assert data.hex() == (
        "4e465231" "03000000" "411d67b1" "01000000" "4000000000000000" "4000000000000000" "0500000000000000" "616263"
    )  # fmt: skip
    assert frame_is_sound(FRAME_HEADER.unpack_from(data), data[FRAME_HEADER.size :])


def test_an_entry_has_these_bytes() -> None:
    head = ENTRY_HEAD.pack(2, 0, 3, 4, 5, 6)
    tail = ENTRY_TAIL.pack(7, 8, 9, 0, 10, ID, 11, 12, 13)
    assert (head + tail).hex() == (
        "02" "00" "0300" "04000000" "0500000000000000" "0600000000000000"
        "0700000000000000" "08000000" "0900" "0000" "0a00000000000000"
        "018f0e4c3a5b7c6d8e9fa0b1c2d3e4f5" "0b000000" "0c000000" "0d00000000000000"
    )  # fmt: skip


def test_crc32c_is_the_castagnoli_one() -> None:
    """The check value of RFC 3720."""
    assert crc32c(b"123456789") == 0xE3069283


def test_a_payload_has_these_bytes() -> None:
    data = encode_msgpack(Payload("t", b"hi", "k", "v", {"a": "b"}))
    assert data.hex() == "85a5746f706963a174a4626f6479c4026869a36b6579a16ba3746167a176a76865616465727381a161a162"


def test_a_groups_progress_has_these_bytes() -> None:
    """Attempts that hold keys have a sixth number, and the record the reasons; earlier versions read what they know."""
    plain = Progressed(ATTEMPTS, "g", 1, 2, [(7, 3)])
    assert encode(plain).hex() == "95a8617474656d707473a167010291920703"
    holding = Held(ATTEMPTS, "g", 1, 2, [(7, 3, 0, 1, 0, 9)], ["boom"])
    data = encode(holding)
    assert data.hex() == "96a8617474656d707473a1670102919607030001000991a4626f6f6d"
    (read,) = progressed(RecordType.PROGRESS, memoryview(data))
    assert (read.runs, read.reasons) == ([(7, 3, 0, 1, 0, 9)], ["boom"])
    (read,) = progressed(RecordType.PROGRESS, memoryview(encode(plain)))
    assert (read.runs, read.reasons) == ([(7, 3)], ())
    assert msgspec.msgpack.decode(data, type=Progressed).runs == [(7, 3, 0, 1, 0, 9)]


GOLDEN_LOG = Path(__file__).with_name("golden_log.hex")


def write_golden(directory: Path) -> None:
    """A log with one of each common record, all times and ids fixed."""

    async def run() -> None:
        store = LogStore(directory)
        await store.open(1_000_000)
        await store.create_topic(Topic("t", queues=2))
        second = bytearray(ID)
        second[15] += 1
        halves = [
            NewTransaction(ID, "g", [NewMessage("t", b"one", "k", "v")], "s", "i"),
            NewTransaction(bytes(second), "g", [NewMessage("t", b"two", "k")], "s", "i"),
        ]
        await store.put(halves, 2_000_000)
        await store.decide([(ID, "g", State.COMMITTED), (bytes(second), "g", State.ROLLED_BACK)], 3_000_000)
        await store.close()

    asyncio.run(run())


async def test_a_log_written_by_the_first_version_is_still_read(tmp_path: Path) -> None:
    data = bytes.fromhex("".join(GOLDEN_LOG.read_text().split()))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / f"{0:020d}.log").write_bytes(data)
    store = LogStore(tmp_path / "log")
    await store.open(9_000_000)
    assert store.damages == []
    messages = [m for q in range(2) for m in store.read("t", q, 0, 10, 1000)]
    assert [(m.payload, m.transaction_id, m.committed_us) for m in messages] == [(b"one", ID, 3_000_000)]
    second = ID[:15] + bytes([ID[15] + 1])
    assert await store.states([ID, second]) == [State.COMMITTED, State.ROLLED_BACK]
    await store.close()


def test_the_records_of_that_log_are_still_written_so(tmp_path: Path) -> None:
    """Frames carry the time of day; their bodies are compared."""
    write_golden(tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / f"{0:020d}.log").write_bytes(bytes.fromhex("".join(GOLDEN_LOG.read_text().split())))
    bodies = []
    for name in ("old", "new"):
        disk = Disk(tmp_path / name)
        segments = Segments(disk)
        segments.open_existing()
        bodies.append([bytes(f.body) for f in walk(disk, segments.last, 0, True, []) if f.records])
        segments.close()
    assert bodies[0] == bodies[1]


def test_ids_rise_and_are_version_7() -> None:
    made = [ids.new_id() for _ in range(10_000)]
    assert made == sorted(set(made))
    assert all(ids.from_text(ids.to_text(i)) == i for i in made[:100])
    with pytest.raises(ValueError, match="version 7"):
        ids.from_text("00000000-0000-4000-8000-000000000000")
