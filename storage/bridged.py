"""When a bridge may append: the rule that every storage with queues keeps."""

from __future__ import annotations

from notify.errors import Conflict
from storage.store import BridgeBatch, BridgeState


def check_bridge(known: BridgeState, batch: BridgeBatch) -> None:
    """Raises Conflict unless this bridge is the one that writes, and stands where it thinks it stands."""
    if (batch.claim and batch.epoch <= known.epoch) or batch.epoch < known.epoch:
        refused = Conflict(
            f"source {batch.source!r} has a bridge of epoch {known.epoch}: another bridge has taken over; "
            "stop one of the two"
        )
        refused.code = "stale_epoch"
        raise refused
    if batch.epoch > known.epoch and not batch.claim:
        refused = Conflict(f"source {batch.source!r}: epoch {batch.epoch} was never claimed; claim it first")
        refused.code = "stale_epoch"
        raise refused
    if batch.expected_position != known.position:
        refused = Conflict(f"source {batch.source!r} stands at {known.position!r}, not at {batch.expected_position!r}")
        refused.code = "unexpected_position"
        raise refused
