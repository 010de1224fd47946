"""A group's progress in a partition: the offset that it commits, and the details in the commit's metadata.

The offset is that of the first record which is not done. The metadata is JSON in ASCII, of at most MOST_CHARACTERS
(brokers accept less than 4,096 by default, `offset.metadata.max.bytes`):

| field | content |
|---|---|
| `notify` | 1, the version of this encoding |
| `done` | the records after the offset that are done: base64 of zlib of a bitmap, bit n (lowest first) for offset + n |
| `failed` | [[n, attempts], …]: how often the handlers of the record at offset + n have failed |
| `begun` | [n, …]: an attempt of the record at offset + n has begun; recorded only if a process died before |
| `left` | true: the last owner left the partition in good order, with no handler running |
| `reset` | the id of the last reset of the topic that was carried out here (control.py) |
| `topic` | Kafka's id of the topic that the offset belongs to |
| `last` | [n, epoch]: the last record that was read, at offset + n (n may be negative), and its leader epoch |

Empty fields are left out. Metadata of another kind, such as another tool's, is ignored.

By `last` a group that continues sees whether the partition's log was cut meanwhile, and written again: records that are
written after the loss have a later epoch (KIP-320).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

VERSION = 1
MOST_CHARACTERS = 4_000
MOST_SPAN = 16_384
"""The most offsets from the first record that is not done to the last that may be handled."""
MOST_FAILED = 64
"""The most records of a partition whose failed attempts are counted at the same time."""
MOST_BEGUN = 16
"""The most records of a partition whose attempts are recorded before they begin."""
MOST_ID_CHARACTERS = 64


class _Metadata(msgspec.Struct, omit_defaults=True):
    notify: int
    done: str = ""
    failed: list[tuple[int, int]] = []
    reset: str = ""
    begun: list[int] = []
    left: bool = False
    topic: str = ""
    last: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A group's progress. `done`: offsets above `offset` that are done. `failed`: counts of failed attempts, by offset.
    `begun`: the offsets of attempts whose end is unknown. `left`: no handler was running, and none was about to begin.
    `topic`: the topic's id; empty if unknown. `last`: offset and leader epoch of the last record that was read; None if
    unknown. `is_own`: whether Notify committed it, and not another tool."""

    offset: int
    done: frozenset[int] = frozenset()
    failed: Mapping[int, int] = field(default_factory=dict)
    reset: str = ""
    begun: frozenset[int] = frozenset()
    left: bool = False
    topic: str = ""
    last: tuple[int, int] | None = None
    is_own: bool = True

    def metadata(self) -> str:
        """The commit's metadata. The caller must keep the bounds above."""
        failed = [(offset - self.offset, attempts) for offset, attempts in sorted(self.failed.items())]
        begun = sorted(offset - self.offset for offset in self.begun)
        last = None if self.last is None else (self.last[0] - self.offset, self.last[1])
        fields = _Metadata(
            VERSION, _bitmap(self.offset, self.done), failed, self.reset, begun, self.left, self.topic, last
        )  # fmt: skip
        text = msgspec.json.encode(fields).decode()
        assert len(text) <= MOST_CHARACTERS, "a window keeps MOST_SPAN, MOST_FAILED and MOST_BEGUN"
        return text

    @classmethod
    def of(cls, offset: int, metadata: str | None) -> Progress:
        """The progress of a commit. With metadata from another tool, nothing is done and nothing has failed."""
        try:
            decoded = msgspec.json.decode(metadata or "", type=_Metadata)
            if decoded.notify != VERSION:
                return cls(offset, is_own=False)
            done = frozenset(_offsets(offset, decoded.done))
        except (ValueError, RecursionError, zlib.error):  # ValueError: of JSON, of base64, of characters beyond ASCII
            return cls(offset, is_own=False)
        failed = {offset + n: attempts for n, attempts in decoded.failed}
        begun = frozenset(offset + n for n in decoded.begun)
        last = None if decoded.last is None else (offset + decoded.last[0], decoded.last[1])
        return cls(offset, done, failed, decoded.reset, begun, decoded.left, decoded.topic, last)


def _bitmap(base: int, offsets: Iterable[int]) -> str:
    bits = bytearray(MOST_SPAN // 8 + 1)
    for offset in offsets:
        bits[(offset - base) >> 3] |= 1 << ((offset - base) & 7)
    packed = bits.rstrip(b"\0")
    return base64.b64encode(zlib.compress(packed, 1)).decode() if packed else ""


def _offsets(base: int, text: str) -> list[int]:
    if not text:
        return []
    unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_SPAN // 8 + 1)
    return [base + 8 * at + bit for at, byte in enumerate(unpacked) if byte for bit in range(8) if byte >> bit & 1]
