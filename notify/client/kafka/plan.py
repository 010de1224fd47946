"""Plan: the arguments of a consumer over Kafka, and how partitions are shared: among members, or by one owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from notify.client.handling.hand import Hand
from notify.client.handling.handlers import Handler, handler_of
from notify.client.handling.runs import Holder
from notify.errors import InvalidRequest
from notify.kafka.groups import OWN_TOPICS, kafka_group
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")
Sharing = Literal["group", "broadcast", "owner"]
SHARING: Mapping[str, Sharing] = {
    "shared": "group", "ordered": "group", "broadcast": "broadcast", "exclusive": "owner", "failover": "owner",
}  # fmt: skip
"""How the instances of a group share the partitions, by mode."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of a consumer; times are in seconds; see Consumer.

    `cancel` cancels the handlers of a holder's messages and waits for their end; a handler in a thread continues.
    `is_stopped`: whether no further handler may begin. `is_cut`: whether the process ends immediately, so that nothing
    is waited for. `announce` shows a text to the user. Raises InvalidRequest for handlers that cannot run in the same
    group.
    """

    url: str
    group: str
    instance: str
    handlers: Mapping[str, Handler]
    hand: Hand
    """The messages in hand."""
    cancel: Callable[[Holder], Awaitable[None]]
    is_stopped: Callable[[], bool]
    concurrency: int
    batch: int
    lease: float
    drain: float
    has_login: bool = False
    """Whether a token or TLS of a Notify server was given."""
    has_inbox: bool = False
    announce: Callable[[str], None] = field(default=log.info)
    is_cut: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if self.has_login:
            raise InvalidRequest(
                "a consumer over Kafka takes no token= and no tls=: put security.protocol, sasl.username and other "
                "settings for the brokers into the URL, or into the file that NOTIFY_KAFKA_SETTINGS names"
            )
        if len({SHARING[handler.mode] for handler in self.handlers.values()}) > 1:
            raise InvalidRequest(
                "over Kafka a group has one way to share its partitions: shared and ordered go together, broadcast is "
                "alone, exclusive and failover go together; make a consumer with a group of its own for each",
                "mixed_modes",
            )
        if len({h.mode for h in self.handlers.values()} & {"exclusive", "failover"}) > 1:
            raise InvalidRequest("over Kafka one instance owns all topics of a group: exclusive or failover, not both")
        for handler in self.handlers.values():
            if handler.on_exhausted == "hold":
                raise InvalidRequest(
                    'on_exhausted="hold" needs the queues of a Notify server: over Kafka a message without attempts '
                    f"left becomes a dead letter, and its key continues; topic {handler.topic!r} asks for it"
                )
            if handler.fair_by:
                raise InvalidRequest(
                    "fair_by needs the queues of a Notify server: a partition of Kafka is read in its order; topic "
                    f"{handler.topic!r} asks for it"
                )
            if isinstance(handler.start, int) and handler.start < 0:
                raise InvalidRequest(f"start is an offset from 0 on, not {handler.start}")

    @property
    def at_once(self) -> int:
        """The most messages whose attempts are noted together: those that slow handlers have at a time."""
        has_batches = any(handler.batch is not None for handler in self.handlers.values())
        return self.batch if has_batches else min(self.concurrency, self.batch)

    def handler_of(self, topic: str) -> Handler | None:
        """The handler of a topic. Patterns do not match Notify's own topics, such as the retry topics."""
        handler = handler_of(self.handlers, topic)
        is_met = handler is not None and (handler.topic == topic or not topic.startswith(OWN_TOPICS))
        return handler if is_met else None

    @property
    def sharing(self) -> Sharing:
        return SHARING[next(iter(self.handlers.values())).mode]

    @property
    def is_exclusive(self) -> bool:
        return any(handler.mode == "exclusive" for handler in self.handlers.values())

    @property
    def kafka_group(self) -> str:
        return kafka_group(self.group, self.instance if self.sharing == "broadcast" else None)
