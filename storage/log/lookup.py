"""Looks up a transaction id: its state and its entries."""

from __future__ import annotations

from notify.storage.log.entry import transaction_id_of
from notify.storage.log.journal import Journal
from notify.storage.log.pending import Pending
from notify.storage.log.state import LogState
from notify.storage.records import State


def state_of(state: LogState, transaction_id: bytes) -> State | None:
    """The state of a transaction; None if the id is unknown."""
    pending = state.pending.by_id.get(transaction_id)
    if pending is not None:
        return state_of_pending(pending)
    outcome = state.parts.outcome(transaction_id)
    return None if outcome is None else State.COMMITTED if outcome else State.ROLLED_BACK


def state_of_pending(pending: Pending) -> State:
    return State.PARKED if pending.parked else State.PREPARED


def entries_of(state: LogState, journal: Journal, transaction_id: bytes) -> list[bytes]:
    """Every entry of a transaction in log order, including those on their way to the disk."""
    parts = reversed(list(state.parts.holding(transaction_id)))
    entries = [entry for part in parts for entry in part.lookup(transaction_id)]
    for frame in journal.on_their_way():
        entries += [entry for entry in frame.entries if transaction_id_of(entry) == transaction_id]
    return entries
