"""Making and changing topics: the one place that does it, so that everyone who must know of a topic is told at once."""

from __future__ import annotations

from collections.abc import Callable

from notify.errors import InvalidRequest, UnknownTopic
from notify.limits import check_name
from notify.storage.store import TransactionStore
from notify.storage.topics import Topic


class Topics:
    """The topics of a server. Methods belong to the event loop."""

    def __init__(self, store: TransactionStore, *, on_first_use: bool = True) -> None:
        self._store = store
        self.on_first_use = on_first_use
        """Whether a topic that is only named is made."""
        self._told: list[Callable[[Topic], None]] = []

    def tell(self, listener: Callable[[Topic], None]) -> None:
        """Call `listener` with each topic that is made or changed, before anything can be appended to it."""
        self._told.append(listener)

    def use(self, name: str) -> Topic:
        """The topic of a name, made if it is named for the first time; durable before what names it.

        Raises InvalidRequest for what is no name, UnknownTopic where topics are not made on their first use.
        """
        topic = self._store.topic(name)
        if topic is not None:
            return topic
        check_name("topic", name)
        if not self.on_first_use:
            raise UnknownTopic(
                f"there is no topic {name!r}, and topics are not created on first use here: "
                f"make it with `notify topic create {name} --reason …`"
            )
        return self.put_soon(Topic(name))

    def put_soon(self, topic: Topic) -> Topic:
        """Make or change a topic without waiting; whatever is durable later comes after it. Raises what the storage
        refuses with; nothing has changed then."""
        self._store.create_topic_soon(topic)
        made = self._store.topic(topic.name)
        assert made is not None
        for listener in self._told:
            listener(made)
        return made


def check_retry(ttl_us: int, group: str, topic: str, retry_min_us: int) -> None:
    """Raises InvalidRequest where a topic's time to live is over before a group's first retry."""
    if 0 < ttl_us < retry_min_us:
        raise InvalidRequest(
            f"messages of topic {topic!r} expire after {ttl_us / 1e6:g} s, before group {group!r} tries one again "
            f"({retry_min_us / 1e6:g} s): choose a longer ttl or a shorter retry_min",
            "ttl_below_retry",
        )
