"""An operator's decision on many transactions at once: commit, rollback, or another check of each.

A transaction that was decided meanwhile, or is not known, is refused by itself; the others are carried out all the
same, and repeating a decision changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from notify import ids
from notify.server.core.core import Core
from notify.storage.records import Decided, State

MOST = 4096
"""Transactions of one write: more are left for the next one, the youngest first."""
WANTED: Mapping[str, State | None] = {"commit": State.COMMITTED, "rollback": State.ROLLED_BACK, "check": None}
"""Each action with the outcome that it records; a check records none."""
JOB = "transactions."
"""The kind of a job is this with the action behind it."""
UNDECIDED = (State.PREPARED, State.PARKED)


def packed(names: Sequence[bytes]) -> str:
    """Transaction ids as a job's record keeps them."""
    return b"".join(names).hex()


def unpacked(text: str) -> list[bytes]:
    """The inverse of `packed`."""
    raw = bytes.fromhex(text)
    return [raw[first : first + 16] for first in range(0, len(raw), 16)]


async def act(core: Core, action: str, names: Sequence[bytes]) -> list[dict[str, Any]]:
    """Carry out an action of WANTED; what became of each transaction, in order. Raises Unavailable."""
    wanted = WANTED[action]
    if wanted is None:
        return await _check(core, names)
    decided = await force(core, names, wanted)
    return [
        _item(name, result.state if result.found else None, result.found and result.state == wanted)
        for name, result in zip(names, decided, strict=True)
    ]


async def force(core: Core, names: Sequence[bytes], wanted: State) -> list[Decided]:
    """Record an outcome of transactions whatever their producers say; the results in order. Raises Unavailable."""
    decided = await core.store.decide([(name, None, wanted) for name in names], core.clock(), forced=True)
    changed = sum(result.changed for result in decided)
    if wanted is State.COMMITTED:
        core.metrics.committed += changed
    else:
        core.metrics.rolled_back += changed
    return decided


async def _check(core: Core, names: Sequence[bytes]) -> list[dict[str, Any]]:
    """Make a check of each due now. A PARKED one becomes PREPARED, and has all its checks again."""
    items = []
    for name, state in zip(names, await core.store.states(names), strict=True):
        is_due = state in UNDECIDED and await core.store.resume_checks(name, core.clock(), anew=state is State.PARKED)
        items.append(_item(name, State.PREPARED if is_due else state, is_due))
    return items


def _item(name: bytes, state: State | None, is_done: bool) -> dict[str, Any]:
    item: dict[str, Any] = {"id": ids.to_text(name)}
    if state is None:
        return item | {"status": 404, "detail": "no such transaction is known here"}
    item["state"] = state.name
    if is_done:
        return item | {"status": 200}
    return item | {"status": 409, "code": "outcome_conflict", "detail": f"{state.name} is recorded already and stays"}
