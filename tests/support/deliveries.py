"""The deliveries of an answer to a request to receive, one by one."""

from __future__ import annotations

from notify.client.consumer.reply import runs_of
from notify.client.handling.runs import Times
from notify.protocol.wire import Delivered, Received


class _Nobody:
    """Receives without handlers."""

    def __init__(self) -> None:
        self.times = Times()

    def noted(self, *_: object) -> None: ...

    def settle_noted(self, *_: object) -> None: ...


def each_of(answer: Received) -> list[Delivered]:
    """All messages of an answer with their receipts, whichever form it has. Raises msgspec.ValidationError."""
    return [
        Delivered(
            receipt=run.receipt(range(place, place + 1)),
            id=message.id,
            topic=message.topic,
            queue=message.queue,
            offset=message.offset,
            attempt=message.attempt,
            committed_at=message.committed_at,
            body=message.body,
            key=message.key,
            tag=message.tag,
            headers=dict(message.headers),
            replay=message.replay,
        )
        for run in runs_of(_Nobody(), {}, answer)
        for place, message in enumerate(run.messages)
        if message is not None
    ]
