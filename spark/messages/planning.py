"""Plans a query: its start, the end of each micro-batch, and the ranges that its tasks read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime

from notify.errors import InvalidRequest
from notify.protocol.wire import microseconds
from notify.spark.messages.offsets import Offsets, TopicOffsets, from_text
from notify.spark.messages.options import EARLIEST, LATEST, Options
from notify.spark.messages.reading import Piece, cut, lost, made_anew
from notify.spark.messages.server import Server, TopicState
from notify.spark.messages.shipped import ShippedMessages

log = logging.getLogger("notify.spark")

MOST_PIECES = 100_000
"""The most ranges of one micro-batch, or of one batch query; beyond it they get longer."""


class Planning:
    """Reads the ends of the topics from the server, on the driver. Close it at the end."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._open = ExitStack()
        self._server = self._open.enter_context(closing(Server(options)))
        self._compared: set[str] = set()
        """Topics of which the store and the server were found to have the same messages."""

    def close(self) -> None:
        self._open.close()

    # --- where a query begins and ends ------------------------------------------------------------------------

    def beginning(self) -> Offsets:
        """Where the option startingOffsets says. Raises InvalidRequest, and NotFound for what no longer exists."""
        return self._named("startingOffsets", self._options.starting)

    def ending(self) -> Offsets:
        """Where the option endingOffsets says."""
        return self._named("endingOffsets", self._options.ending)

    def latest(self) -> Offsets:
        """Where the topics end now."""
        return self._each(lambda _topic, _queue, _start, end: end)

    def _named(self, option: str, text: str) -> Offsets:
        if text == LATEST:
            return self.latest()
        if text == EARLIEST:
            # Messages in the store come first.
            return self._each(lambda _topic, _queue, start, _end: 0 if self._options.store else start)
        if text.startswith("{"):
            return self._given(option, from_text(text))
        try:
            time_us = microseconds(datetime.fromisoformat(text))
        except ValueError:
            raise InvalidRequest(
                f"option {option}: write earliest, latest, a time such as 2026-11-23T08:00:00Z, or JSON such as "
                f'{{"orders": {{"0": 120}}}}, not {text[:60]!r}'
            ) from None
        return self._each(lambda topic, queue, start, end: self._offset_at(topic, queue, start, end, time_us))

    def _each(self, of: Callable[[str, int, int, int], int]) -> Offsets:
        offsets = {}
        for topic in self._options.topics:
            state = self._server.topic(topic)
            next_ = {queue: of(topic, queue, start, end) for queue, (start, end) in state.bounds.items()}
            offsets[topic] = TopicOffsets(state.number, next_, _ends(state))
        return offsets

    def _given(self, option: str, given: Offsets) -> Offsets:
        if missing := set(self._options.topics) - set(given):
            raise InvalidRequest(f"option {option}: it names no offsets of {', '.join(sorted(missing))}")
        offsets = {}
        for topic in self._options.topics:
            state = self._server.topic(topic)
            if given[topic].number not in (0, state.number):
                self._lose(made_anew(topic, given[topic].number, state.number))
            next_ = {}
            for queue, (start, end) in state.bounds.items():
                offset = given[topic].next.get(queue, start)
                if offset > end:
                    raise InvalidRequest(
                        f"option {option}: queue {queue} of topic {topic!r} ends at {end}, and {offset} is beyond it"
                    )
                if offset < start and not self._options.store:
                    self._lose(lost(topic, queue, offset, start, False))
                    offset = start
                next_[queue] = offset
            offsets[topic] = TopicOffsets(state.number, next_, _ends(state))
        return offsets

    def _offset_at(self, topic: str, queue: int, start: int, end: int, time_us: int) -> int:
        """The first offset that was committed at an instant or later; the next one where there is none."""
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            pulled = self._server.pull(topic, queue, middle, 1)
            if pulled is None or not pulled[0]:
                low = middle + 1  # dropped meanwhile, or not readable
            elif microseconds(datetime.fromisoformat(pulled[0][0].committed_at)) >= time_us:
                high = middle
            else:
                low = max(middle, pulled[0][0].offset) + 1
        if low == start and self._options.store:
            with closing(ShippedMessages(self._options)) as store:
                return store.offset_at(topic, self._server.topic(topic).number, queue, time_us, start)
        return low

    # --- one micro-batch after another ------------------------------------------------------------------------

    def following(self, offsets: Offsets, most_rows: int | None, until: Offsets | None = None) -> Offsets:
        """The end of the next rows from `offsets` on: at most `most_rows` rows, and not beyond `until`.

        Each queue gets a share of the rows that is as large as its share of what is left to read.
        """
        states = {topic: self._server.topic(topic) for topic in self._options.topics}
        now = {topic: self._continued(topic, offsets.get(topic), state) for topic, state in states.items()}
        spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for topic, state in states.items():
            bound = until[topic] if until is not None and until[topic].number == state.number else None
            for queue, (_, end) in state.bounds.items():
                if bound is not None:
                    end = min(end, bound.next.get(queue, 0))
                spans[(topic, queue)] = list(state.spans(queue, now[topic].next[queue], end))
        taken = shares({key: sum(b - a for a, b in runs) for key, runs in spans.items()}, most_rows)
        return {
            topic: replace(
                each, next={q: behind(at, taken[(topic, q)], spans[(topic, q)]) for q, at in each.next.items()}
            )
            for topic, each in now.items()
        }

    def _continued(self, topic: str, read: TopicOffsets | None, state: TopicState) -> TopicOffsets:
        """The read position of a topic, with all its present queues. Raises NotFound for what no longer exists."""
        if read is None:  # a topic that was added to the query
            return TopicOffsets(state.number, dict.fromkeys(state.bounds, 0), _ends(state))
        if read.number != state.number:
            self._lose(made_anew(topic, read.number, state.number))
            return TopicOffsets(state.number, dict.fromkeys(state.bounds, 0))
        next_ = {}
        for queue, (start, end) in state.bounds.items():
            at = read.next.get(queue, 0)
            if at > end:
                self._lose(cut(topic, queue, at, end))
                at = end
            if at < start and not self._options.store:
                self._lose(lost(topic, queue, at, start, False))
                at = start
            next_[queue] = at
        return TopicOffsets(state.number, next_, read.known)

    def _lose(self, error: Exception) -> None:
        if self._options.fails_on_loss:
            raise error
        log.warning("%s", error)

    # --- ranges -----------------------------------------------------------------------------------------------

    def pieces(self, start: Offsets, end: Offsets) -> list[Piece]:
        """The ranges between two offsets, each of at most as many rows as the option rowsPerPartition says."""
        states = {topic: self._server.topic(topic) for topic in self._options.topics if topic in end}
        ranges = [each for topic, state in states.items() for each in _ranges(topic, state, start, end)]
        total = sum(last - first for _, _, first, last in ranges)
        most = max(self._options.rows_per_partition, -(-total // MOST_PIECES))
        pieces = []
        for topic, queue, first, last in ranges:
            self._compare(topic, queue, first, states[topic])
            known, number = end[topic].known.get(queue, 0), end[topic].number
            pieces += [Piece(topic, number, queue, at, min(at + most, last), known) for at in range(first, last, most)]
        return pieces

    def _compare(self, topic: str, queue: int, first: int, state: TopicState) -> None:
        """Refuse a store that is of another log, once, before anything is taken from it."""
        start, end = state.bounds.get(queue, (0, 0))
        if not self._options.store or topic in self._compared or first >= start or start == end:
            return
        pulled = self._server.pull(topic, queue, start, 1)
        if pulled is None or not pulled[0]:
            return
        served = pulled[0][0]
        with closing(ShippedMessages(self._options)) as store:
            for batch in store.rows(topic, state.number, queue, served.offset, served.offset + 1):
                if (shipped_id := batch.column("id")[0].as_py()) != served.id:
                    raise InvalidRequest(
                        f"the store {self._options.store} is of another log than the server: offset {served.offset} of "
                        f"queue {queue} of topic {topic!r} is {shipped_id} in one and {served.id} in the other. Name "
                        "the store that this server ships to (option store)"
                    )
        self._compared.add(topic)


def _ranges(topic: str, state: TopicState, start: Offsets, end: Offsets) -> Iterator[tuple[str, int, int, int]]:
    """The runs of a topic's offsets between two others, as (topic, queue, first, end)."""
    before = start.get(topic)
    is_same = before is not None and before.number == end[topic].number
    for queue, last in sorted(end[topic].next.items()):
        first = before.next.get(queue, 0) if before is not None and is_same else 0
        for a, b in state.spans(queue, first, last):
            yield topic, queue, a, b


def _ends(state: TopicState) -> dict[int, int]:
    return {queue: end for queue, (_, end) in state.bounds.items()}


def behind(at: int, rows: int, spans: list[tuple[int, int]]) -> int:
    """The offset after `rows` rows from `at` on, which are in these spans."""
    for first, end in spans:
        if rows <= 0:
            break
        at = min(first + rows, end)
        rows -= at - first
    return at


def shares(left: dict[tuple[str, int], int], most: int | None) -> dict[tuple[str, int], int]:
    """How many of `most` rows each queue gets: first one each, the rest in proportion to what is left in it."""
    if most is None or sum(left.values()) <= most:
        return left
    fullest = sorted(left, key=lambda queue: -left[queue])
    first_rows = {queue: 1 for queue in fullest[:most] if left[queue]}
    rest = most - len(first_rows)
    more = {queue: left[queue] - first_rows.get(queue, 0) for queue in fullest}
    total = sum(more.values())
    taken = {queue: first_rows.get(queue, 0) + more[queue] * rest // total for queue in fullest}
    for queue in fullest:
        if sum(taken.values()) >= most:
            break
        taken[queue] += taken[queue] < left[queue]
    return taken
