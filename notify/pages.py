"""Transactions of an outbox as movers read them: in pages of so many bytes, beside those whose rows are no message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from sqlalchemy.engine import Connection

from notify.outbox import Outbox, Place
from notify.refused import Refusal
from notify.wire import BridgedTransaction

UNREADABLE = "unreadable"
"""The code of a transaction whose row is no message."""
HEAD_BYTES = 512
"""A transaction takes about so many bytes besides its bodies."""


def cut(places: Iterable[Place], most_bytes: int) -> Iterator[list[Place]]:
    """Places in pages whose transactions have so many bytes together, or one transaction."""
    page: list[Place] = []
    size = 0
    for place in places:
        if page and size + place.size + HEAD_BYTES > most_bytes:
            yield page
            page, size = [], 0
        page.append(place)
        size += place.size + HEAD_BYTES
    if page:
        yield page


def readable(
    connection: Connection, outbox: Outbox, names: Sequence[str]
) -> tuple[list[BridgedTransaction], list[Refusal]]:
    """These transactions in this order; and those of them whose rows are no message, to be listed as refused."""
    try:
        return outbox.read(connection, names), []
    except (msgspec.MsgspecError, ValueError):
        pass  # which ones, each alone says
    transactions: list[BridgedTransaction] = []
    unreadable: list[Refusal] = []
    for name in names:
        try:
            transactions += outbox.read(connection, [name])
        except (msgspec.MsgspecError, ValueError) as error:
            detail = f"its row is no message: {error}"
            unreadable.append(Refusal(name, *outbox.whose(connection, name), 422, UNREADABLE, detail))
    return transactions, unreadable
