"""A source's position, and when a bridge may append a batch: the rule that every storage with queues keeps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from notify import ids
from notify.errors import Conflict, stale_epoch
from notify.wire import BridgeBatch


class BridgeState(msgspec.Struct):
    """How far a bridge has come with a source: durable together with the messages up to there."""

    source: str
    epoch: int = 0  # of the bridge that writes now; an older one is refused
    position: str = ""  # the bridge's own words, compared as they are; empty: nothing yet
    rows: int = 0  # transactions taken over so far
    updated_us: int = 0
    since: str | None = None
    """Where the source stood before this batch: an audit sees from it that none is missing. None: not recorded."""


class IdsInUse(Conflict):
    """Ids of a batch are other transactions', and the batch is stored whole or not at all."""

    code = "id_in_use"

    def __init__(self, transaction_ids: Sequence[bytes]) -> None:
        super().__init__(f"{len(transaction_ids)} ids of the batch belong to other transactions")
        self.ids = transaction_ids


def check_bridge(known: BridgeState, batch: BridgeBatch) -> None:
    """Raises Conflict unless this bridge is the one that writes, and stands where it thinks it stands."""
    source = known.source
    if (batch.claim and batch.epoch <= known.epoch) or batch.epoch < known.epoch:
        raise stale_epoch(
            f"source {source!r} has a bridge of epoch {known.epoch}: another bridge has taken over; stop one of the two"
        )
    if batch.epoch > known.epoch and not batch.claim:
        raise stale_epoch(f"source {source!r}: epoch {batch.epoch} was never claimed; claim it first")
    if batch.expected_position != known.position:
        raise Conflict(
            f"source {source!r} stands at {known.position!r}, not at {batch.expected_position!r}",
            "unexpected_position",
        )


def is_prepared_by(source: str, half_source: str, half_instance: str) -> bool:
    """Whether a half with these marks is a part that a bridge of this source prepared: a bridge names its source, and
    no instance."""
    return half_source == source and not half_instance


def refuse_foreign(source: str, foreign: Sequence[bytes]) -> None:
    """Raises Conflict where a batch would decide halves that no bridge of its source has prepared."""
    if foreign:
        raise Conflict(
            f"half {ids.to_text(foreign[0])} is none that a bridge of source {source!r} prepared: its producers "
            f"decide it ({len(foreign)} such)",
            "foreign_half",
        )
