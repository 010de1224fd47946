"""The deliveries in a server's answer, one by one, whichever form they came in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import msgspec

from notify.protocol import ids
from notify.protocol.wire import RUN_HEAD, Delivered, DeliveredRun, Received, instant


def each_of(received: Received) -> list[Delivered]:
    """All deliveries of an answer. Raises msgspec.ValidationError if the fields of a run do not fit each other."""
    return received.messages + [delivered for run in received.runs for delivered in _of_run(run)]


def _of_run(run: DeliveredRun) -> Iterator[Delivered]:
    count = len(run.messages)
    attempts = repeat(1, count) if run.attempts is None else run.attempts
    if (
        len(run.heads) != RUN_HEAD.size * count
        or sum([n for _, n in run.offsets]) != count
        or (run.attempts is not None and len(run.attempts) != count)
    ):
        raise msgspec.ValidationError("a run has not as many heads, offsets or attempts as messages")
    offsets = chain.from_iterable([range(first, first + n) for first, n in run.offsets])
    heads = RUN_HEAD.iter_unpack(run.heads)
    places = zip(run.messages, heads, offsets, attempts, strict=True)
    for place, (m, (transaction_id, number, committed_us), offset, attempt) in enumerate(places):
        yield Delivered(
            receipt=f"{run.lease}.{place}",
            id=ids.message_id(transaction_id, number),
            topic=m.topic,
            queue=run.queue,
            offset=offset,
            attempt=attempt,
            committed_at=instant(committed_us),
            body=m.body,
            key=m.key,
            tag=m.tag,
            headers=m.headers,
            replay=run.replay,
        )
