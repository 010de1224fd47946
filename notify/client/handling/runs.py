"""Run: messages of one lease on their way from the reply to the settle, and how long they waited and were handled."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from notify.client.handling.handlers import Handler
from notify.protocol.latency import HANDLED, SLOWEST, WAITED, Histogram, written, written_slowest
from notify.protocol.message import ReceivedMessage
from notify.runtime import tracing


class Holder(Protocol):
    """A session of a queue server, or Kafka's Handling: it received runs of messages, and settles them."""

    times: Times
    """Counts how long its messages waited, and their handlers took."""

    def noted(self, run: Run, place: int, error: BaseException) -> None:
        """The handler of a message of a run has raised an error."""

    def settle_noted(self, run: Run, returned: Sequence[range]) -> None:
        """All that was noted of a run has been told. `returned`: the places of messages whose handlers have returned,
        which are to be acknowledged."""


class Times:
    """How long messages waited in hand, and their handlers took."""

    __slots__ = ("_slowest", "_slowest_trace", "handled", "waited")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.waited, self.handled = Histogram(), Histogram()
        self._slowest, self._slowest_trace = -1.0, ""

    def add(self, run: Run, places: Sequence[int], began: list[float], took: list[float]) -> None:
        """Count the calls of the handlers of a run's messages at these places: when each began (`perf_counter`), and
        how long it took, in seconds. Messages of one call have the same times."""
        since = run.began
        self.waited.add_all_of([at - since for at in began])
        self.handled.add_all_of(took)
        if run.is_traced:
            for place, seconds in zip(places, took, strict=True):
                if seconds > self._slowest and (trace_id := tracing.trace_id(run.message(place).headers)):
                    self._slowest, self._slowest_trace = seconds, trace_id

    def taken(self) -> str:
        """The counts since the last call, as the query of a settlement; empty if there are none."""
        if not any(self.handled.counts):
            return ""
        query = f"?{WAITED}={written(self.waited)}&{HANDLED}={written(self.handled)}"
        if self._slowest_trace:
            query += f"&{SLOWEST}={written_slowest(int(self._slowest * 1e6), self._slowest_trace)}"
        self._reset()
        return query


class Run:
    """Messages of one lease, and so of one queue, in their order. Changed only on the event loop."""

    __slots__ = (
        "_first",
        "began",
        "handler",
        "holder",
        "is_open",
        "is_traced",
        "lease",
        "messages",
        "sizes",
        "unsettled",
        "until_us",
    )

    def __init__(
        self,
        holder: Holder,
        handler: Handler | None,
        lease: str,
        first: int | None,
        messages: Sequence[ReceivedMessage],
    ) -> None:
        """`first`: the place in the lease of the first message; None: `lease` is the receipt of an only message."""
        self.holder = holder
        self.handler = handler
        self.lease = lease
        self._first = first
        self.messages: list[ReceivedMessage | None] = [*messages]
        """The messages by place, as their handlers get them; None: settled."""
        self.sizes = [len(message.body) for message in messages]
        """The bytes of their bodies, which a handler cannot change."""
        self.is_open = bytearray(b"\1") * len(messages)
        """By place, whether the message still waits, or its handler is running."""
        self.is_traced = any(tracing.HEADER in message.headers for message in messages)
        """Whether some of the messages may belong to traces."""
        self.unsettled = len(messages)
        self.began = time.perf_counter()
        """When it came to this consumer."""
        self.until_us = sys.maxsize
        """When its lease ends, as far as this consumer knows (`boot_clock`): no handler is called from then on."""

    def message(self, place: int) -> ReceivedMessage:
        """A message that is not settled yet."""
        message = self.messages[place]
        assert message is not None
        return message

    def receipt(self, places: range) -> str:
        """The receipt of one message, or of several that lie side by side."""
        if self._first is None:
            return self.lease
        first, last = self._first + places[0], self._first + places[-1]
        return f"{self.lease}.{first}" if first == last else f"{self.lease}.{first}-{last}"

    def may_begin(self, place: int, now_us: int) -> bool:
        """Whether the handler of a waiting message may be called at this time (`boot_clock`). If not, its lease is
        over: another consumer may have had the message since, and later ones of its key."""
        return now_us < self.until_us and self.is_open[place] == 1

    def close(self, places: range) -> None:
        """The handlers of these messages have returned, or will not be called."""
        self.is_open[places.start : places.stop] = bytes(len(places))

    def open_places(self) -> list[int]:
        """The places of messages whose handlers have not returned."""
        return [place for place, is_open in enumerate(self.is_open) if is_open]

    def settled(self, places: range) -> int:
        """Forget messages that are settled; the bytes of their bodies."""
        settled = slice(places.start, places.stop)
        size = sum(self.sizes[settled])
        self.messages[settled] = [None] * len(places)
        self.unsettled -= len(places)
        return size


Waiting = tuple[Run, int]
"""A message that waits for its handler: its run, and its place there."""


def ranges_of(places: Iterable[int]) -> list[range]:
    """The ranges that cover these places."""
    ranges: list[range] = []
    start = stop = -1
    for place in sorted(places):
        if place != stop:
            if stop > start:
                ranges.append(range(start, stop))
            start = place
        stop = place + 1
    if stop > start:
        ranges.append(range(start, stop))
    return ranges


def messages_of(lot: Iterable[Waiting]) -> list[ReceivedMessage]:
    """The messages of a lot."""
    return [run.message(place) for run, place in lot]


def by_run(waiting: Iterable[Waiting]) -> Iterator[tuple[Run, list[int]]]:
    """The places of waiting messages, by run."""
    places_by_run: dict[Run, list[int]] = {}
    for run, place in waiting:
        places_by_run.setdefault(run, []).append(place)
    yield from places_by_run.items()
