"""LoggedTransaction: the messages of a transaction as they stand in PostgreSQL's log, where a producer writes no rows.

A producer with `rows=False` writes it with `pg_logical_emit_message`, and a bridge reads it.
"""

from __future__ import annotations

import msgspec

from notify.protocol.wire import Fields, PackedMessage

PREFIX = "notify"
"""The prefix of these messages among those of other programs."""
_MARK, _VERSION = b"notify-transaction", b"\x01"


class LoggedTransaction(Fields):
    """A transaction with its messages. `home`: the schema with Notify's tables that its producer uses."""

    home: str
    id: str
    producer_group: str
    messages: list[PackedMessage]


class NewerVersion(ValueError):
    """The text is of a version that this one does not know."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LoggedTransaction)


def encode(transaction: LoggedTransaction) -> bytes:
    """The content of a message of the log."""
    return _MARK + _VERSION + _encoder.encode(transaction)


def decode(content: bytes) -> LoggedTransaction | None:
    """The opposite of `encode`; None for the content of another program. Raises NewerVersion, and msgspec's errors for
    content that is damaged."""
    if not content.startswith(_MARK):
        return None
    at = len(_MARK)
    if content[at : at + 1] != _VERSION:
        raise NewerVersion(f"version {content[at : at + 1].hex() or 'none'} of the messages of producers without rows")
    return _decoder.decode(content[at + 1 :])
