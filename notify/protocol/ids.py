"""Transaction and message ids: UUIDs of version 7 (RFC 9562), made by the producer.

An id is 16 bytes in storage and the usual 36 characters on the wire. A message's id is `{transaction}.{n}`, with n from
0. The ids of one process rise strictly, so that a server recognizes quickly that an id is new.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from notify.errors import InvalidId
from notify.protocol.limits import digits

_TEXT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")
_STEPS = struct.Struct("256I")


class _Generator:
    """Makes ids: milliseconds, then 73 random bits, to which random steps are added within a millisecond."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._millisecond = 0
        self._id = 0
        self._steps: list[int] = []

    def next(self) -> bytes:
        now = time.time_ns() // 1_000_000
        with self._lock:
            if now > self._millisecond:
                self._millisecond = now
                # The highest of the 62 bits after the variant is free, so that the steps never reach the variant.
                random_bits = int.from_bytes(os.urandom(10))
                a, b = random_bits & 0xFFF, (random_bits >> 12) & ((1 << 61) - 1)
                self._id = (now << 80) | (7 << 76) | (a << 64) | (2 << 62) | b
            else:
                if not self._steps:
                    self._steps = list(_STEPS.unpack(os.urandom(_STEPS.size)))
                self._id += self._steps.pop() + 1
            return self._id.to_bytes(16)


_generator = _Generator()


def new_id() -> bytes:
    """A new transaction id, 16 bytes."""
    global _generator
    if _generator.process != os.getpid():
        # A forked child that inherited the counter would repeat its parent's ids, and the lock may be held for ever.
        # Not every fork calls Python's hooks.
        _generator = _Generator()
    return _generator.next()


def derived(transaction_id: bytes, salt: bytes) -> bytes:
    """An id that is computed from another id and a salt, for a message that is sent again.

    Repeating this gives the same id, which contains the same time as the original id.
    """
    return _made_of(blake2b(transaction_id + salt, digest_size=16).digest(), transaction_id[:6])


def scheduled(secret: str, instant_us: int) -> bytes:
    """The id of the message that a schedule sends for an instant (microseconds since 1970), whose time it contains.

    `secret` is the schedule's own: who could compute the id could send another message under it first.
    """
    digest = blake2b(instant_us.to_bytes(8), key=secret.encode(), digest_size=16).digest()
    return _made_of(digest, (instant_us // 1000).to_bytes(6))


def _made_of(digest: bytes, milliseconds: bytes) -> bytes:
    """A UUID of version 7 with this time (6 bytes), and the other bits of a digest."""
    made = bytearray(digest)
    made[:6] = milliseconds
    made[6] = 0x70 | made[6] & 0x0F
    made[8] = 0x80 | made[8] & 0x3F
    return bytes(made)


def republished(message_no: int) -> bytes:
    """The salt of a message that is published again because no queue has it."""
    return b"republish" + message_no.to_bytes(2)


def redelivered(group: str, message_no: int) -> bytes:
    """The salt of a message that is sent to a group again because it had no effect there."""
    return b"redeliver" + message_no.to_bytes(2) + group.encode()


def to_text(transaction_id: bytes) -> str:
    """The 36-character form of 16 bytes."""
    return f"{transaction_id[:4].hex()}-{transaction_id[4:10].hex('-', 2)}-{transaction_id[10:].hex()}"


@lru_cache(16_384)  # a server reads each id twice in quick succession: with the half, then with its outcome
def from_text(text: str) -> bytes:
    """The 16 bytes of a UUID of version 7 in its usual form, lower case.

    Raises InvalidId for anything else, other versions of UUID included.
    """
    if _TEXT.match(text) is None:
        raise InvalidId(f"{text[:60]!r} is not a UUID of version 7 (lower case, with dashes)")
    return bytes.fromhex(text.replace("-", ""))


_WIDTH = 37
"""The characters of an id and of the line feed after it."""
_DASHES_AT = (8, 13, 18, 23)
_VARIANTS = frozenset("89ab")
FEW_IDS = 5
"""Fewer ids are quicker checked one by one."""


def from_texts(texts: Sequence[str]) -> list[bytes] | list[bytes | InvalidId]:
    """For each text the 16 bytes of its id, or the error of `from_text`."""
    together = _together(texts) if len(texts) >= FEW_IDS else None
    return [_or_error(text) for text in texts] if together is None else together


def _or_error(text: str) -> bytes | InvalidId:
    try:
        return from_text(text)
    except InvalidId as error:
        return error


def _together(texts: Sequence[str]) -> list[bytes] | None:
    """The 16 bytes of each id; None if `from_text` would refuse one of them.

    Many ids are checked together, one column after another, which costs a third of a call of `from_text` for each.
    """
    count = len(texts)
    joined = "\n".join(texts)
    if len(joined) != _WIDTH * count - 1 or joined.count("\n") != count - 1 or joined != joined.lower():
        return None
    if joined[36::_WIDTH] != "\n" * (count - 1) or joined[14::_WIDTH] != "7" * count:
        return None
    if not _VARIANTS.issuperset(joined[19::_WIDTH]) or any(joined[at::_WIDTH] != "-" * count for at in _DASHES_AT):
        return None
    try:
        joined_bytes = bytes.fromhex(joined.replace("-", ""))
    except ValueError:
        return None
    # A space in place of a digit is skipped, as the line feeds are: then some bytes are missing.
    if len(joined_bytes) != 16 * count:
        return None
    return [joined_bytes[at : at + 16] for at in range(0, 16 * count, 16)]


def message_id(transaction_id: bytes, message_no: int) -> str:
    """The message id `{transaction}.{n}`."""
    return f"{to_text(transaction_id)}.{message_no}"


def message_ids(heads: Iterable[tuple[bytes, int]]) -> list[str]:
    """`message_id` of each of many transaction ids and message numbers, without a call for each."""
    return [f"{id[:4].hex()}-{id[4:10].hex('-', 2)}-{id[10:].hex()}.{message_no}" for id, message_no in heads]


def parse_message_id(text: str) -> tuple[bytes, int]:
    """The transaction id and the message number of a message id; a transaction id alone means message 0. Raises
    InvalidId."""
    transaction, dot, text_of_number = text.partition(".")
    number = digits(text_of_number, 4) if dot else 0
    if number is None:
        raise InvalidId(f"{text[:60]!r} is not a message id: it should read {{transaction}}.{{n}}")
    return from_text(transaction), number


def milliseconds(transaction_id: bytes) -> int:
    """When the id was made, by its producer's clock, in milliseconds since 1970."""
    return int.from_bytes(transaction_id[:6])
