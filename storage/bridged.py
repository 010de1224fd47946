"""A bridge's position in its source, and the rules for appending a batch, which every storage with queues applies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from notify.errors import Conflict, stale_epoch
from notify.protocol import ids
from notify.protocol.wire import BridgeBatch


class BridgeState(msgspec.Struct):
    """The position of a bridge in its source, durable together with the messages before it."""

    source: str
    epoch: int = 0  # of the bridge that writes now; a bridge of a lower epoch is refused
    position: str = ""  # in the bridge's own form, compared byte by byte; empty: nothing was appended yet
    rows: int = 0  # transactions appended so far
    updated_us: int = 0
    since: str | None = None
    """The position before this batch, with which an audit sees that no batch is missing. None: not recorded."""


class IdsInUse(Conflict):
    """A batch is refused as a whole because some of its ids belong to other transactions."""

    code = "id_in_use"

    def __init__(self, transaction_ids: Sequence[bytes]) -> None:
        super().__init__(f"{len(transaction_ids)} ids of the batch belong to other transactions")
        self.ids = transaction_ids


def check_bridge(recorded: BridgeState, batch: BridgeBatch) -> None:
    """Raises Conflict unless the batch comes from the bridge that writes now and continues at the recorded position."""
    source = recorded.source
    if (batch.claim and batch.epoch <= recorded.epoch) or batch.epoch < recorded.epoch:
        raise stale_epoch(
            f"source {source!r} has a bridge of epoch {recorded.epoch}: another bridge has taken over; stop one of the "
            "two"
        )
    if batch.epoch > recorded.epoch and not batch.claim:
        raise stale_epoch(f"source {source!r}: epoch {batch.epoch} was never claimed; claim it first")
    if batch.expected_position != recorded.position:
        raise Conflict(
            f"source {source!r} is at {recorded.position[:300]!r}, not at {batch.expected_position[:300]!r}",
            "unexpected_position",
        )


UNNAMED = "unnamed"
"""The instance of a producer's half with a source, if the producer names none: see `is_prepared_by`."""


def is_prepared_by(source: str, half_source: str, half_instance: str) -> bool:
    """Whether a bridge of this source prepared the half: a bridge's half names the bridge's source and no instance."""
    return half_source == source and not half_instance


def refuse_foreign(source: str, foreign: Sequence[bytes]) -> None:
    """Raises Conflict if `foreign`, the halves of a batch that no bridge of its source prepared, is not empty."""
    if foreign:
        raise Conflict(
            f"no bridge of source {source!r} prepared half {ids.to_text(foreign[0])}: only its producers decide it "
            f"(such halves in the batch: {len(foreign)})",
            "foreign_half",
        )
