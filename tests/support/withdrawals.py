"""Messages that withdraw others, as tests store them, and their fates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer, WithdrawalOutcome
from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.protocol.withdrawal import CANCELS, REPLACES, Fate, Wanted
from notify.storage.records import NewMessage, NewTransaction
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import bodies, drain
from tests.support.http import admin

T0 = 1_800_000_000_000_000
SECOND = 1_000_000
HOUR_SECONDS = 3600.0


def wanting(target: bytes, number: int = 0, *, by: bytes | None = None, topic: str = "t", **options: Any) -> NewMessage:
    """A message that cancels another one, or replaces it by a body."""
    header = CANCELS if by is None else REPLACES
    payload = Payload(topic, by or b"", headers={header: ids.message_id(target, number)})
    wanted = Wanted(target, number, by is not None)
    return NewMessage(topic, encode_msgpack(payload), acts=wanted, **options)


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


def withdraw_some(producer: TransactionProducer, engine: sa.Engine, topic: str, move: Callable[[], object]) -> set[str]:
    """Delayed messages of transactions are cancelled, replaced and kept; `move` brings what is committed to the queues.

    Only `kept` and `second` are then delivered. Returns the ids of the two that were withdrawn in time.
    """

    def sent(act: Callable[[Session], Any]) -> Any:
        with Session(engine) as session, session.begin():
            done = act(session)
        assert producer.flush(PATIENCE_SECONDS) == []
        return done

    def delayed(session: Session) -> list[str]:
        delays = {"dropped": HOUR_SECONDS, "first": HOUR_SECONDS, "kept": 1.0}
        return [producer.send(session, Message(topic, text, key="k", delay=delay)).id for text, delay in delays.items()]

    dropped, first, kept = sent(delayed)
    cancel, replace = sent(
        lambda session: (
            producer.cancel(session, dropped, topic=topic, key="k"),
            producer.replace(session, first, Message(topic, "second", key="k")),
        )
    )
    with pytest.raises(ZeroDivisionError), Session(engine) as session, session.begin():
        producer.cancel(session, kept, topic=topic, key="k")
        raise ZeroDivisionError
    move()
    withdrawn = WithdrawalOutcome.WITHDRAWN
    assert (cancel.outcome(PATIENCE_SECONDS), replace.outcome(PATIENCE_SECONDS)) == (withdrawn, withdrawn)
    late = sent(lambda session: producer.cancel(session, replace.id, topic=topic, key="k"))
    move()
    assert late.outcome(PATIENCE_SECONDS) is WithdrawalOutcome.TOO_LATE
    return {dropped, first}


def check_delivered(url: str, group: str, topic: str, withdrawn: set[str]) -> None:
    """Check that a group gets what `withdraw_some` has left, and that the server tells of the others."""
    assert sorted(bodies(drain(url, group, topic, 2))) == ["kept", "second"]
    for message_id in withdrawn:
        life = admin(url, "GET", f"messages/{message_id}")
        assert "withdrawn" in [event["event"] for event in life["timeline"]], life
