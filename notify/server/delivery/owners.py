"""Topics that one instance of a group has to itself, in the modes exclusive and failover."""

from __future__ import annotations

from dataclasses import dataclass

OWNED = ("exclusive", "failover")
"""Modes in which one instance has the topic to itself."""


@dataclass(slots=True)
class Owner:
    """The instance that alone receives a topic, until it has asked for nothing, and settled nothing, for its lease."""

    instance: str
    until_us: int


class Owners:
    """Who has which topic of a group to itself, and until when."""

    __slots__ = ("by_topic",)

    def __init__(self) -> None:
        self.by_topic: dict[str, Owner] = {}

    def keep(self, topic: str, instance: str, until_us: int) -> None:
        """The instance has the topic until then at least: it had it already, or nobody has it."""
        owner = self.by_topic.get(topic)
        self.by_topic[topic] = Owner(instance, until_us if owner is None else max(until_us, owner.until_us))

    def prolong(self, topic: str, instance: str, until_us: int) -> None:
        """The instance is still at work on the topic, and has it until then, if it has it at all."""
        owner = self.by_topic.get(topic)
        if owner is not None and owner.instance == instance:
            owner.until_us = max(owner.until_us, until_us)

    def forget(self, topic: str) -> None:
        """Nobody has the topic any more."""
        self.by_topic.pop(topic, None)
