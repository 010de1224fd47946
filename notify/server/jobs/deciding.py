"""An operator's decision on many transactions: commit them, roll them back, or check them again.

A transaction that has been decided in the meantime, or is unknown, is refused; the decision still applies to the
others. Repeating a decision changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from notify.protocol import ids
from notify.server.core.core import Core
from notify.storage.records import Decided, State

MOST = 4096
"""The most transactions of one write, the oldest ones; the rest is left for another write."""
WANTED: Mapping[str, State | None] = {"commit": State.COMMITTED, "rollback": State.ROLLED_BACK, "check": None}
"""The outcome that each action records; a check records no outcome."""
JOB = "transactions."
"""The prefix of a job's kind; the action follows."""
UNDECIDED = (State.PREPARED, State.PARKED)


def packed(transaction_ids: Sequence[bytes]) -> str:
    """Encode transaction ids for a job's record."""
    return b"".join(transaction_ids).hex()


def unpacked(text: str) -> list[bytes]:
    """The inverse of `packed`."""
    raw = bytes.fromhex(text)
    return [raw[first : first + 16] for first in range(0, len(raw), 16)]


async def act(core: Core, action: str, transaction_ids: Sequence[bytes]) -> list[dict[str, Any]]:
    """Carry out an action of WANTED; the result for each transaction, in order. Raises Unavailable."""
    wanted = WANTED[action]
    if wanted is None:
        return await _check(core, transaction_ids)
    decided = await force(core, transaction_ids, wanted)
    return [
        _item(transaction_id, result.state if result.found else None, result.found and result.state == wanted)
        for transaction_id, result in zip(transaction_ids, decided, strict=True)
    ]


async def force(core: Core, transaction_ids: Sequence[bytes], wanted: State) -> list[Decided]:
    """Record an outcome without asking the producers; the results in order. Raises Unavailable."""
    decided = await core.store.decide(
        [(transaction_id, None, wanted) for transaction_id in transaction_ids], core.clock(), forced=True
    )
    changed = sum(result.changed for result in decided)
    if wanted is State.COMMITTED:
        core.metrics.committed += changed
    else:
        core.metrics.rolled_back += changed
    return decided


async def _check(core: Core, transaction_ids: Sequence[bytes]) -> list[dict[str, Any]]:
    """Make a check of each transaction due now. A PARKED one becomes PREPARED, and its checks start over."""
    items = []
    for transaction_id, state in zip(transaction_ids, await core.store.states(transaction_ids), strict=True):
        is_due = state in UNDECIDED and await core.store.resume_checks(
            transaction_id, core.clock(), reset=state is State.PARKED
        )
        items.append(_item(transaction_id, State.PREPARED if is_due else state, is_due))
    return items


def _item(transaction_id: bytes, state: State | None, is_done: bool) -> dict[str, Any]:
    item: dict[str, Any] = {"id": ids.to_text(transaction_id)}
    if state is None:
        return item | {"status": 404, "detail": "no such transaction is known here"}
    item["state"] = state.name
    if is_done:
        return item | {"status": 200}
    return item | {"status": 409, "code": "outcome_conflict", "detail": f"{state.name} is already recorded, and final"}
