"""Withdrawals: messages that cancel or replace a delayed message. Two headers make a message one, so that it goes every
way that messages go: as a half, as a row of an outbox, through a relay or a bridge."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime

import msgspec

from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.keys import key_hash

CANCELS = "notify-cancels"
"""The header of a message that cancels the delayed message whose id it names. It is never delivered."""
REPLACES = "notify-replaces"
"""The header of a message that replaces the delayed message whose id it names: one of the two is delivered."""
DEDUPE = "notify-dedupe"
"""The header with the key of a message of which one is pending at a time."""
KEEP = "notify-dedupe-keep"
"""The header that says whether the `first` message of a dedupe key stays (the default), or the `last` replaces it."""
OWN = frozenset((CANCELS, REPLACES, DEDUPE, KEEP))
"""The headers that act on the server when a message is sent. Handlers do not get them: one that sends the headers of
its message on would withdraw or collapse what it sends."""
DEDUPE_CHARACTERS = 255
ANY_TOPIC = "notify-withdrawals"
"""The topic of a cancellation whose sender does not name the topic of the delayed message. Its right to publish is the
right to cancel in every topic; no message is ever delivered from it."""
KAFKA_REFUSES = (
    "Kafka is the queue here, and a record that is written there can neither be withdrawn nor collapsed: have "
    "the handler look in the database whether the message still counts, or use a topic of Notify's own queue for such "
    "messages"
)


class Fate(enum.IntEnum):
    """The end of a withdrawal, or how it stands."""

    WITHDRAWN = 1  # in time: the delayed message is never delivered; a replacement takes its place
    TOO_LATE = 2  # the message was in its queue already, or had no delay
    NOT_FOUND = 3  # rolled back, collapsed, of another topic, or never arrived
    WAITING = 4  # the message is undecided, or has not arrived yet
    ALREADY = 5  # another withdrawal of the message came first
    COLLAPSED = 6  # not a withdrawal: a message of the same dedupe key was pending


class Dedupe(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The key of a message of which one is pending at a time. `last`: whether it replaces the pending one."""

    key_hash: int
    last: bool = False


class Wanted(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The delayed message that a withdrawal names. `replaces`: whether the withdrawal is a message itself."""

    id: bytes
    number: int
    replaces: bool = False

    @property
    def text(self) -> str:
        return ids.message_id(self.id, self.number)


def without_own(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers of a message without those that act when a message is sent."""
    if OWN.isdisjoint(headers):
        return headers
    return {name: value for name, value in headers.items() if name not in OWN}


def dedupe_of(headers: Mapping[str, str]) -> Dedupe | None:
    """The dedupe key in headers; None if they have none. Raises InvalidRequest."""
    key, keep = headers.get(DEDUPE), headers.get(KEEP, "first")
    if key is None:
        return None
    if not 0 < len(key) <= DEDUPE_CHARACTERS:
        raise InvalidRequest(f"a dedupe key has 1 to {DEDUPE_CHARACTERS} characters", "invalid_dedupe")
    if keep not in ("first", "last"):
        raise InvalidRequest(f"{KEEP} is first or last, not {keep[:20]!r}", "invalid_dedupe")
    return Dedupe(key_hash(key), keep == "last")


def wanted_of(headers: Mapping[str, str]) -> Wanted | None:
    """The message that headers withdraw; None if they withdraw none. Raises InvalidRequest."""
    cancels, replaces = headers.get(CANCELS), headers.get(REPLACES)
    if cancels is None and replaces is None:
        return None
    if cancels is not None and replaces is not None:
        raise InvalidRequest(f"give {CANCELS} or {REPLACES}, not both", "invalid_withdrawal")
    transaction_id, number = ids.parse_message_id(cancels or replaces or "")
    return Wanted(transaction_id, number, replaces is not None)


def check_own(
    topic: str,
    headers: Mapping[str, str],
    body: bytes,
    delay: float | None,
    deliver_at: datetime | None,
    ttl: float | None,
) -> Wanted | Dedupe | None:
    """The message that a message withdraws, or its dedupe key. Raises InvalidRequest for what no server takes."""
    wanted, dedupe = wanted_of(headers), dedupe_of(headers)
    if dedupe is not None and (delay is None or wanted is not None):
        raise InvalidRequest(
            "a message with a dedupe key has a delay, for which it is pending, and withdraws no other message",
            "invalid_dedupe",
        )
    if wanted is not None and wanted.replaces and topic == ANY_TOPIC:
        raise InvalidRequest(
            "a replacement is sent to the topic of the message that it replaces: nothing is delivered from "
            f"{ANY_TOPIC!r}",
            "invalid_withdrawal",
        )
    if wanted is not None and not wanted.replaces and (body or delay or deliver_at or ttl):
        raise InvalidRequest(
            f"a cancellation is never delivered: it has no body, delay and ttl; to send another message instead, name "
            f"the first one in the header {REPLACES}",
            "invalid_withdrawal",
        )
    return wanted or dedupe
