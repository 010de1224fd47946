"""Admission: what a request for the storage must be, item by item, whoever sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from notify import ids
from notify.errors import InvalidRequest, NotifyError
from notify.limits import check_message
from notify.server.access import Principal
from notify.server.core.flow import retry_after
from notify.storage.records import NewMessage
from notify.wire import Item, JsonMessage, PackedMessage, encode_msgpack


def new_messages(
    messages: Iterable[JsonMessage | PackedMessage],
    now_us: int,
    has_topic: Callable[[str], bool],
    make_topic: Callable[[str], object],
    sender: Principal | None = None,
) -> list[NewMessage]:
    """Messages as the storage takes them; topics that are named for the first time are made.

    `sender`: who has to have the right to publish them; None: nobody is asked for it. Raises InvalidRequest, TooLarge,
    Forbidden, and what `make_topic` raises.
    """
    new = []
    for m in messages:
        if sender is not None:
            sender.check("publish", m.topic)
        if not has_topic(m.topic):
            make_topic(m.topic)
        content, delay_us, deliver_at_us, ttl_us = check_message(m, now_us)
        payload = encode_msgpack(content)
        new.append(NewMessage(m.topic, payload, m.key, m.tag, delay_us, deliver_at_us, ttl_us, content))
    return new


def failed(item_id: str, error: NotifyError, state: str | None = None) -> Item:
    """The item of a batch that an error refuses."""
    return Item(item_id, error.status, state, code=error.code, detail=str(error), retry_after=retry_after(error))


def parse_id(text: str) -> bytes:
    """A transaction's id. Raises InvalidRequest."""
    try:
        return ids.from_text(text)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_id") from None


def parse_message_id(text: str) -> tuple[bytes, int]:
    """A transaction's id, and the number of a message in it. Raises InvalidRequest."""
    try:
        return ids.parse_message_id(text)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_id") from None


def check_text(what: str, text: str) -> None:
    """Raises InvalidRequest for a text that is too long."""
    if len(text) > 255:
        raise InvalidRequest(f"{what} has {len(text)} characters; at most 255 are allowed", "out_of_bounds")
