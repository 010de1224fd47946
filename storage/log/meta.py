"""META records: what the log keeps of topics, subscriptions and the like. A tagged struct for each; prose: format.md.

The first item of a record's array is its tag. A record whose tag this version does not know is passed over.
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
    """The policies of a topic that came after the first two, without those that have their defaults."""

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
    """A topic was made or changed. Without `more` it is written as before there was any."""

    more: MorePolicies = NO_MORE_POLICIES


class StartSet(msgspec.Struct, array_like=True, tag="start"):
    """A queue's messages below an offset were let go of."""

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
    """The next offset of each queue: what came behind it was not for the group any more."""


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
    """Entries name a producer group by this number from here on."""

    number: int
    name: str


class BridgeMoved(msgspec.Struct, array_like=True, tag="bridge"):
    """A bridge's batch is stored: in the frame of that batch."""

    bridge: BridgeState


class BridgeBased(msgspec.Struct, array_like=True, tag="bridge_base"):
    """The text that a source's long positions refer to from here on; in the frame of the batch that brings it."""

    source: str
    base: str


class Restored(msgspec.Struct, array_like=True, tag="restored"):
    """The log before this record is what was shipped of an earlier one; what that had besides is lost.

    `generation` counts the log's lives, from 1; `known_to_us`: when the last frame before was written.
    """

    generation: int
    known_to_us: int


class Withdraws(msgspec.Struct, array_like=True, tag="withdraws"):
    """A message withdraws another one, if it is committed: in the frame of the message, before its record."""

    id: bytes
    message_no: int
    wanted: Wanted


class Dedupes(msgspec.Struct, array_like=True, tag="dedupes"):
    """A message has a dedupe key: in the frame of the message, before its record."""

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
    """The data of a META record as plain values, whatever its tag. Raises msgspec.DecodeError."""
    return _decode_any(data)


def of_plain(record: list[Any]) -> Meta | None:
    """The struct for what `plain` gave; None for a tag that is not known. Raises msgspec.ValidationError."""
    return msgspec.convert(record, Meta) if record and record[0] in _TAGS else None


def decoded(data: bytes | memoryview) -> Meta | None:
    """The struct of a META record's data; None for a tag that is not known. Raises msgspec.DecodeError."""
    try:
        known: Meta = _decode(data)
        return known
    except msgspec.ValidationError:
        record = plain(data)
        if record and record[0] in _TAGS:
            raise
        return None
