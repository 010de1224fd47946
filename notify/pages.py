"""Transactions of an outbox as movers read them: in pages of so many bytes, beside those whose rows are no message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError

from notify.outbox import Outbox, Place
from notify.refused import Refusal
from notify.wire import BridgedTransaction

UNREADABLE = "unreadable"
"""The code of a transaction whose row is no message."""
NOT_A_MESSAGE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, DataError)
"""Errors of a row that is no message: what its text or numbers are not, and instants beyond Python's calendar."""
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
    except NOT_A_MESSAGE:
        pass  # which ones, each alone says
    transactions: list[BridgedTransaction] = []
    unreadable: list[Refusal] = []
    for name in names:
        try:
            transactions += outbox.read(connection, [name])
        except NOT_A_MESSAGE as error:
            detail = f"its row is no message: {getattr(error, 'orig', error)}"
            unreadable.append(Refusal(name, *outbox.whose(connection, name), 422, UNREADABLE, detail))
    return transactions, unreadable
