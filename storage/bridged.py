"""A bridge's position and batch, and when it may append: the rule that every storage with queues keeps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from notify import ids
from notify.errors import Conflict
from notify.storage.records import NewTransaction


class BridgeState(msgspec.Struct):
    """How far a bridge has come with a source: durable together with the messages up to there."""

    source: str
    epoch: int = 0  # of the bridge that writes now; an older one is refused
    position: str = ""  # the bridge's own words, compared as they are; empty: nothing yet
    rows: int = 0  # transactions taken over so far
    updated_us: int = 0
    since: str | None = None
    """Where the source stood before this batch: an audit sees from it that none is missing. None: not recorded."""


class BridgeBatch(msgspec.Struct):
    """A bridge's batch: transactions, and the position behind them."""

    source: str
    epoch: int
    expected_position: str
    position: str
    transactions: Sequence[NewTransaction] = ()
    commit: Sequence[bytes] = ()  # halves of earlier parts, which become visible with this batch
    claim: bool = False  # a bridge begins: its epoch must be above every earlier one


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
        raise Conflict(
            f"source {batch.source!r} stands at {known.position!r}, not at {batch.expected_position!r}",
            "unexpected_position",
        )


def is_prepared_by(source: str, half_source: str, half_instance: str) -> bool:
    """Whether a half with these marks is a part that a bridge of this source prepared: a bridge names its source, and
    no instance."""
    return half_source == source and not half_instance


def refuse_foreign(batch: BridgeBatch, foreign: Sequence[bytes]) -> None:
    """Raises Conflict where a batch would commit halves that no bridge of its source has prepared."""
    if foreign:
        raise Conflict(
            f"half {ids.to_text(foreign[0])} is none that a bridge of source {batch.source!r} prepared: its producers "
            f"decide it ({len(foreign)} such)",
            "foreign_half",
        )


def stale_epoch(detail: str) -> Conflict:
    """The error for a bridge that another has superseded."""
    return Conflict(detail, "stale_epoch")
