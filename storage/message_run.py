"""Runs: neighbouring messages of a queue, encoded together for answers to consumers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from notify.protocol.wire import RUN_HEAD, array_head, encode_msgpack
from notify.storage.progress import to_runs
from notify.storage.records import StoredMessage

LEAST = 16
"""Fewer messages are encoded one by one, which is cheaper."""
RUN_FIELDS = 4
"""The fields of a `DeliveredRun` that `encoded_run` has."""


def total_of(times: array[int]) -> int:
    """The sum of times. numpy adds many times faster, but only up to 63 bits."""
    if len(times) < LEAST:
        return sum(times)
    first = times[0]
    return first * len(times) + int((np.frombuffer(times, np.int64) - first).sum())


class CommitTimes(msgspec.Struct, frozen=True, gc=False):
    """When messages were committed, or released to their queue, in microseconds since 1970: 8 bytes for each."""

    each: array[int]
    """The times in the order of the offsets; this is also the order of time if `total_us` is known."""
    total_us: int | None = None
    """The sum; None: the messages are not adjacent, so the times may be in any order."""

    def of(self, places: range) -> tuple[Sequence[int], int]:
        """The times at these neighbouring places, the oldest first, and their sum."""
        if self.total_us is not None and len(places) == len(self.each):
            return self.each, self.total_us
        times = self.each[places.start : places.stop]
        return (sorted(times) if self.total_us is None else times), total_of(times)


class MessageRun(msgspec.Struct, frozen=True, gc=False):
    """Messages without a gap between them, none damaged. `encoded` is the same for all groups that receive them."""

    first: int
    """The first offset."""
    count: int
    size: int
    """The bytes of all payloads."""
    expires_us: int
    """When the first message expires; 0: none expires."""
    encoded: bytes
    """See `encoded_run`."""
    times: CommitTimes

    @property
    def offsets(self) -> range:
        return range(self.first, self.first + self.count)


class KeptRuns:
    """The newest runs, for other groups that read the same queues within milliseconds."""

    def __init__(self, most: int = 8 << 20) -> None:
        """`most`: the most bytes of all runs. A run larger than an eighth of that is not kept."""
        self._most = most
        self._runs: dict[tuple[int, int], MessageRun] = {}
        """The runs by the queue's key and the first offset, the oldest first."""
        self.bytes = 0

    def get(self, queue: int, first: int, count: int) -> MessageRun | None:
        """The run of exactly these messages, if it is kept."""
        run = self._runs.get((queue, first))
        return run if run is not None and run.count == count else None

    def keep(self, queue: int, run: MessageRun) -> None:
        """Keep a run, and drop older ones beyond the bound."""
        size = len(run.encoded)
        if size > self._most // 8:
            return
        replaced = self._runs.pop((queue, run.first), None)
        self._runs[(queue, run.first)] = run
        self.bytes += size - (0 if replaced is None else len(replaced.encoded))
        while self.bytes > self._most:
            self.bytes -= len(self._runs.pop(next(iter(self._runs))).encoded)


def encoded_run(
    queue: int, offsets: Sequence[tuple[int, int]], heads: bytes, count: int, payloads: Iterable[bytes]
) -> bytes:
    """The fields of a `DeliveredRun` that do not depend on its group. `offsets`: runs of them (first, count); `heads`:
    a RUN_HEAD for each message. The payloads, which are maps in msgpack, are elements of an array."""
    return b"".join(
        (
            b"\xa5queue", encode_msgpack(queue), b"\xa7offsets", encode_msgpack(offsets),
            b"\xa5heads", encode_msgpack(heads), b"\xa8messages", array_head(count), *payloads,
        )
    )  # fmt: skip


def encoded_messages(messages: Sequence[StoredMessage]) -> bytes:
    """`encoded_run` for messages of one queue."""
    heads = b"".join([RUN_HEAD.pack(m.transaction_id, m.message_no, m.committed_us) for m in messages])
    offsets = to_runs([m.offset for m in messages])
    return encoded_run(messages[0].queue, offsets, heads, len(messages), [m.payload for m in messages])


def run_of(messages: Sequence[StoredMessage], offset: int) -> MessageRun | None:
    """The run of these messages, the first of which should be at `offset`; None if some are missing or damaged."""
    if not messages or messages[0].offset != offset or messages[-1].offset != offset + len(messages) - 1:
        return None
    if any(m.corrupt for m in messages):
        return None
    size = sum([len(m.payload) for m in messages])
    expires_us = min([m.expires_us for m in messages if m.expires_us], default=0)
    times = array("Q", [m.committed_us for m in messages])
    encoded = encoded_messages(messages)
    return MessageRun(offset, len(messages), size, expires_us, encoded, CommitTimes(times, total_of(times)))
