"""Topics that one instance of a group owns, in the modes exclusive and failover."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_EARLIER = 8


@dataclass(slots=True)
class Owner:
    """The only instance that receives a topic, until it has neither asked nor settled for the length of its lease."""

    instance: str
    until_us: int
    session: str = ""
    """The consumer that has the instance's name; "": unknown."""
    earlier: list[str] = field(default_factory=list)
    """The consumers that had this name before, the last one at the end."""

    def take(self, session: str) -> bool | None:
        """Have a consumer have this name, if it is a new one. Returns whether another one had it, which may hold
        messages; None: a later one has it."""
        if session in self.earlier:
            return None
        had, self.session = self.session, session
        if had in ("", session):
            return False
        self.earlier = [*self.earlier, had][-MOST_EARLIER:]
        return True


class Owners:
    """The owner of each topic of a group, and until when it owns the topic."""

    __slots__ = ("by_topic",)

    def __init__(self) -> None:
        self.by_topic: dict[str, Owner] = {}

    def keep(self, topic: str, instance: str, until_us: int) -> None:
        """Have the instance, the present owner or a new one, own the topic at least until `until_us`."""
        owner = self.by_topic.get(topic)
        if owner is None or owner.instance != instance:
            owner = self.by_topic[topic] = Owner(instance, until_us if owner is None else owner.until_us)
        owner.until_us = max(until_us, owner.until_us)

    def prolong(self, topic: str, instance: str, until_us: int) -> None:
        """Extend the ownership of the topic until `until_us` if the instance is its owner."""
        owner = self.by_topic.get(topic)
        if owner is not None and owner.instance == instance:
            owner.until_us = max(owner.until_us, until_us)

    def forget(self, topic: str) -> None:
        """End the ownership of a topic."""
        self.by_topic.pop(topic, None)
