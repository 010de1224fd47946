"""One wrong byte of the log is found and corrected; more damage is reported."""

from __future__ import annotations

import random

import pytest

from notify.protocol import ids
from notify.spark.inputs.damage import examine
from notify.storage.log.entry import ENTRY, EntryKind
from notify.storage.log.format import FRAME_HEADER_SIZE, frame
from notify.storage.log.records import RECORD_HEADER, RecordType

BASE = 4096


def sample(messages: int = 3, size: int = 40) -> tuple[bytes, list[bytes]]:
    """A frame with one half of each id, and the ids."""
    names = [ids.new_id() for _ in range(messages)]
    payloads = [bytes(random.Random(n).randbytes(size)) for n in range(messages)]
    meta = b"\x02\x00xx"
    at = BASE + FRAME_HEADER_SIZE + RECORD_HEADER.size + messages * ENTRY.size + len(meta)
    entries = [
        ENTRY.pack(EntryKind.HALF, 0, 0, 1, 5, 0, at + n * size, size, 0, 1, 0, name, 0, 0, 0)
        for n, name in enumerate(names)
    ]
    data = meta + b"".join(payloads)
    length = RECORD_HEADER.size + messages * ENTRY.size + len(data)
    body = RECORD_HEADER.pack(length, RecordType.HALF, 0, messages) + b"".join(entries) + data
    return frame(body, 1, BASE, 0, 77), names


def test_every_byte_of_a_frame_is_found_when_it_is_wrong() -> None:
    whole, _ = sample()
    chance = random.Random(5)
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= chance.randrange(1, 256)
        (broken,) = examine(bytes(data), BASE)
        assert broken.body == whole[FRAME_HEADER_SIZE:], place
        assert (broken.position, broken.end) == (BASE, BASE + len(whole))


def test_the_message_whose_payload_it_is_is_named() -> None:
    whole, names = sample(size=40)
    payloads_at = len(whole) - 3 * 40
    for number, name in enumerate(names):
        data = bytearray(whole)
        data[payloads_at + 40 * number + 7] ^= 0x10
        (broken,) = examine(bytes(data), BASE)
        assert broken.message == (ids.to_text(name), 0)
        assert f"byte {BASE + payloads_at + 40 * number + 7} is" in broken.detail
    data = bytearray(whole)
    data[FRAME_HEADER_SIZE + 20] ^= 1  # within an entry
    assert next(examine(bytes(data), BASE)).message is None


@pytest.mark.parametrize("gap", [1, 2, 9, 60])
def test_two_wrong_bytes_are_not_taken_for_one(gap: int) -> None:
    whole, _ = sample()
    chance = random.Random(gap)
    for _ in range(50):
        data = bytearray(whole)
        place = chance.randrange(FRAME_HEADER_SIZE, len(whole) - gap)
        data[place] ^= chance.randrange(1, 256)
        data[place + gap] ^= chance.randrange(1, 256)
        (broken,) = examine(bytes(data), BASE)
        assert broken.body is None and "more than one" in broken.detail


def test_damaged_frames_beside_each_other_are_each_looked_at() -> None:
    first, names = sample()
    data = bytearray(first + frame(first[FRAME_HEADER_SIZE:], 1, BASE + len(first), 0, 78))
    data[len(first) - 1] ^= 1
    data[-1] ^= 1
    damages = list(examine(bytes(data), BASE))
    assert [b.position for b in damages] == [BASE, BASE + len(first)]
    assert damages[0].message == (ids.to_text(names[2]), 0) and damages[1].body is not None


def test_bytes_that_are_not_a_frame_are_reported() -> None:
    assert next(examine(b"short", BASE)).body is None
    assert next(examine(random.Random(1).randbytes(300), BASE)).body is None
