"""The messages of a server's answer to a request to receive, in the runs in which they are handled and settled."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat

import msgspec

from notify.client.handling.handlers import Handler, handler_of
from notify.client.handling.runs import Holder, Run
from notify.protocol import ids
from notify.protocol.limits import digits
from notify.protocol.message import ReceivedMessage, received
from notify.protocol.wire import RUN_HEAD, Delivered, DeliveredRun, Received, instants
from notify.protocol.withdrawal import without_own

_Leased = tuple[str, int | None, list[ReceivedMessage]]
"""The lease of neighbouring messages, and the place of the first of them there; or a receipt and None."""


def runs_of(holder: Holder, handlers: Mapping[str, Handler], answer: Received) -> list[Run]:
    """The runs of an answer, whichever form it has. Raises msgspec.ValidationError if the fields of a run do not fit
    each other."""
    leased: list[_Leased] = [(run.lease, 0, _messages_of(run)) for run in answer.runs if run.messages]
    leased += _neighbours(answer.messages)
    return [
        Run(holder, handler_of(handlers, messages[0].topic), lease, first, messages)
        for lease, first, messages in leased
    ]  # fmt: skip


def _messages_of(run: DeliveredRun) -> list[ReceivedMessage]:
    count = len(run.messages)
    attempts = repeat(1, count) if run.attempts is None else run.attempts
    if (
        len(run.heads) != RUN_HEAD.size * count
        or sum([n for _, n in run.offsets]) != count
        or (run.attempts is not None and len(run.attempts) != count)
    ):
        raise msgspec.ValidationError("a run has not as many heads, offsets or attempts as messages")
    offsets = chain.from_iterable([range(first, first + n) for first, n in run.offsets])
    heads = list(RUN_HEAD.iter_unpack(run.heads))
    message_ids = ids.message_ids([(transaction_id, number) for transaction_id, number, _ in heads])
    committed = instants([committed_us for _, _, committed_us in heads])
    places = zip(run.messages, message_ids, offsets, attempts, committed, strict=True)
    queue, replay = run.queue, run.replay
    return [
        received(
            message_id, m.topic, queue, offset, m.body, m.key, m.tag, without_own(m.headers) if m.headers else {},
            attempt, committed_at, replay,
        )
        for m, message_id, offset, attempt, committed_at in places
    ]  # fmt: skip


def _neighbours(deliveries: list[Delivered]) -> list[_Leased]:
    """Messages in the older form of answers. Those whose receipts are `lease.place`, `lease.place + 1`, and so on
    belong together."""
    found: list[_Leased] = []
    following: tuple[str, int] | None = None
    for d in deliveries:
        headers = without_own(d.headers) if d.headers else {}
        message = received(
            d.id, d.topic, d.queue, d.offset, d.body, d.key, d.tag, headers, d.attempt, d.committed_at, d.replay
        )
        lease, _, text = d.receipt.rpartition(".")
        place = digits(text)
        if place is None or text != str(place):  # a receipt of another form names this message alone
            found.append((d.receipt, None, [message]))
            following = None
            continue
        if following == (lease, place):
            found[-1][2].append(message)
        else:
            found.append((lease, place, [message]))
        following = lease, place + 1
    return found
