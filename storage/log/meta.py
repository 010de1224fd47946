"""META records: a tagged struct for each change of topics, subscriptions and the like. Described in format.md.

The first item of a record's array is its tag. A record with an unknown tag is skipped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from notify.protocol.withdrawal import Dedupe, Wanted
from notify.storage.bridged import BridgeState
from notify.storage.groups import Priorities, Subscription
from notify.storage.log.records import encode
from notify.storage.topics import Backlog, Flush

Growths = tuple[tuple[int, ...], ...]


class MorePolicies(msgspec.Struct, omit_defaults=True, frozen=True):
    """The policies of a topic after its first two; those with their default values are left out."""

    retention_bytes: int = 0
    ttl_us: int = 0
    backlog: int = 0
    backlog_policy: Backlog = Backlog.REFUSE
    grown: Growths = ()


NO_MORE_POLICIES = MorePolicies()


class _PlainTopicSet(msgspec.Struct, array_like=True, tag="topic"):
    number: int
    name: str
    queues: int
    retention_us: int
    flush: Flush


class TopicSet(_PlainTopicSet, array_like=True, tag="topic"):
    """A topic was made or changed. Without `more` it has the form that it had before there was `more`."""

    more: MorePolicies = NO_MORE_POLICIES


class StartSet(msgspec.Struct, array_like=True, tag="start"):
    """A queue's messages below an offset were dropped."""

    topic: int
    queue: int
    offset: int


class TopicDeleted(msgspec.Struct, array_like=True, tag="delete_topic"):
    """A topic was deleted with its messages. Earlier versions did not write which subscriptions it had."""

    name: str
    subscriptions: list[Subscription] = []


class Subscribed(msgspec.Struct, array_like=True, tag="subscribe"):
    """A subscription was made or changed; `offsets`, one a queue, moved it."""

    subscription: Subscription
    offsets: list[int] | None


class Unsubscribed(msgspec.Struct, array_like=True, tag="unsubscribe"):
    """A subscription ended. Earlier versions wrote only its names."""

    group: str
    topic: str
    subscription: Subscription | None = None
    ends: list[int] = []
    """The next offset of each queue: later messages were not for the group."""


class PatternSet(msgspec.Struct, array_like=True, tag="pattern"):
    subscription: Subscription


class PatternDropped(msgspec.Struct, array_like=True, tag="drop_pattern"):
    group: str
    pattern: str


class PrioritiesSet(msgspec.Struct, array_like=True, tag="priorities"):
    group: str
    priorities: Priorities


class PauseSet(msgspec.Struct, array_like=True, tag="pause"):
    group: str
    paused: bool


class ProducerGroupNumbered(msgspec.Struct, array_like=True, tag="producer_group"):
    """From here on entries name a producer group by this number."""

    number: int
    name: str


class BridgeMoved(msgspec.Struct, array_like=True, tag="bridge"):
    """A bridge's batch is stored. In the same frame as the batch."""

    bridge: BridgeState


class BridgeBased(msgspec.Struct, array_like=True, tag="bridge_base"):
    """The text that a source's long positions refer to from here on. In the frame of the batch that brings it."""

    source: str
    base: str


class Restored(msgspec.Struct, array_like=True, tag="restored"):
    """The log before this record is the shipped part of an earlier log; the rest of that one is lost.

    `generation` counts from 1; `known_to_us`: when the last frame before was written.
    """

    generation: int
    known_to_us: int


class Withdraws(msgspec.Struct, array_like=True, tag="withdraws"):
    """A message that withdraws another one once it is committed. In the message's frame, before its record."""

    id: bytes
    message_no: int
    wanted: Wanted


class Dedupes(msgspec.Struct, array_like=True, tag="dedupes"):
    """A message with a dedupe key. In the message's frame, before its record."""

    id: bytes
    message_no: int
    dedupe: Dedupe


Meta = (
    TopicSet
    | StartSet
    | TopicDeleted
    | Subscribed
    | Unsubscribed
    | PatternSet
    | PatternDropped
    | PrioritiesSet
    | PauseSet
    | ProducerGroupNumbered
    | BridgeMoved
    | BridgeBased
    | Restored
    | Withdraws
    | Dedupes
)
_TAGS = frozenset(kind.__struct_config__.tag for kind in Meta.__args__)
_decode = msgspec.msgpack.Decoder(Meta).decode
_decode_any = msgspec.msgpack.Decoder(list[Any]).decode


def encoded(meta: Meta) -> bytes:
    """The data of a META record."""
    if isinstance(meta, TopicSet) and meta.more == NO_MORE_POLICIES:
        return encode(_PlainTopicSet(meta.number, meta.name, meta.queues, meta.retention_us, meta.flush))
    return encode(meta)


def plain(data: bytes | memoryview) -> list[Any]:
    """The data of a META record of any tag, as plain values. Raises msgspec.DecodeError."""
    return _decode_any(data)


def of_plain(record: list[Any]) -> Meta | None:
    """The struct for the values that `plain` returned; None for an unknown tag. Raises msgspec.ValidationError."""
    return msgspec.convert(record, Meta) if record and record[0] in _TAGS else None


def decoded(data: bytes | memoryview) -> Meta | None:
    """The struct of a META record's data; None for an unknown tag. Raises msgspec.DecodeError."""
    try:
        known: Meta = _decode(data)
        return known
    except msgspec.ValidationError:
        record = plain(data)
        if record and record[0] in _TAGS:
            raise
        return None
