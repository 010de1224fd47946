"""When a bridge may append: the rule that every storage with queues keeps."""

from __future__ import annotations

from notify.errors import Conflict
from storage.store import BridgeBatch, BridgeState


def check_bridge(known: BridgeState, batch: BridgeBatch) -> None:
    """Raises Conflict unless this bridge is the one that writes, and stands where it thinks it stands."""
    if (batch.claim and batch.epoch <= known.epoch) or batch.epoch < known.epoch:
        raise stale_epoch(
            f"source {batch.source!r} has a bridge of epoch {known.epoch}: another bridge has taken over; "
            "stop one of the two"
        )
    if batch.epoch > known.epoch and not batch.claim:
        raise stale_epoch(f"source {batch.source!r}: epoch {batch.epoch} was never claimed; claim it first")
    if batch.expected_position != known.position:
        refused = Conflict(f"source {batch.source!r} stands at {known.position!r}, not at {batch.expected_position!r}")
        refused.code = "unexpected_position"
        raise refused


def stale_epoch(detail: str) -> Conflict:
    """What a bridge hears that another has superseded."""
    refused = Conflict(detail)
    refused.code = "stale_epoch"
    return refused
