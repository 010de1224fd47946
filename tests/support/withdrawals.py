"""Messages that withdraw others, as tests store them, and their fates."""

from __future__ import annotations

from typing import Any

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.protocol.withdrawal import CANCELS, REPLACES, Fate, Wanted
from notify.storage.records import NewMessage, NewTransaction

T0 = 1_800_000_000_000_000
SECOND = 1_000_000


def wanting(target: bytes, number: int = 0, *, by: bytes | None = None, topic: str = "t", **options: Any) -> NewMessage:
    """A message that cancels another one, or replaces it by a body."""
    header = CANCELS if by is None else REPLACES
    payload = Payload(topic, by or b"", headers={header: ids.message_id(target, number)})
    wanted = Wanted(target, number, by is not None)
    return NewMessage(topic, encode_msgpack(payload), withdraws=wanted, **options)


def withdrawing(target: bytes, number: int = 0, *, committed: bool = False, **options: Any) -> NewTransaction:
    return NewTransaction(ids.new_id(), "g", [wanting(target, number, **options)], committed=committed)


def fate(b: Any, t: NewTransaction, number: int = 0, now_us: int = T0) -> Fate | None:
    """The fate of a withdrawal that a bench's store has."""
    found = b.store.withdrawal(t.id, number, now_us)
    assert found is not None
    result: Fate | None = found.fate
    return result


async def release(b: Any, now_us: int = T0 + 101 * SECOND) -> None:
    """Release all that is due then, a few at a time."""
    while b.store.release_due(now_us, 3):
        pass
    await b.store.sync()
