"""Reads transactions of an outbox in pages of bounded size, and separates those whose rows are not messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError

from notify.client.tables.outbox import Outbox, Place
from notify.movers.refused import Refusal
from notify.protocol.wire import BridgedTransaction

UNREADABLE = "unreadable"
"""The code of a transaction whose row is not a message."""
NOT_A_MESSAGE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, DataError)
"""The errors of a row that is not a message: invalid text or numbers, or times that Python's datetime does not know."""
HEAD_BYTES = 512
"""About the bytes of a transaction without its bodies."""


def cut(places: Iterable[Place], most_bytes: int) -> Iterator[list[Place]]:
    """Divide places into pages whose transactions have at most `most_bytes` together; a larger one is a page alone."""
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
    connection: Connection, outbox: Outbox, transaction_ids: Sequence[str]
) -> tuple[list[BridgedTransaction], list[Refusal]]:
    """These transactions, in this order, and a refusal for each transaction whose rows are not messages."""
    try:
        with _part(connection):
            return outbox.read(connection, transaction_ids), []
    except NOT_A_MESSAGE:
        pass  # read each transaction alone, to find the unreadable ones
    transactions: list[BridgedTransaction] = []
    unreadable: list[Refusal] = []
    for transaction_id in transaction_ids:
        try:
            with _part(connection):
                transactions += outbox.read(connection, [transaction_id])
        except NOT_A_MESSAGE as error:
            detail = f"its row is not a valid message: {getattr(error, 'orig', error)}"
            whose = outbox.whose(connection, transaction_id)
            unreadable.append(Refusal(transaction_id, *whose, 422, UNREADABLE, detail))
    return transactions, unreadable


def _part(connection: Connection) -> AbstractContextManager[Any]:
    """A savepoint where the database itself may refuse to give a row: a PostgreSQL with the encoding SQL_ASCII gives
    none whose bytes are not UTF-8, and then nothing else until the transaction, or the savepoint, is rolled back."""
    info = getattr(connection.connection.driver_connection, "info", None)
    tells = getattr(info, "parameter_status", None)
    return connection.begin_nested() if tells is not None and tells("server_encoding") == "SQL_ASCII" else nullcontext()
