"""Who takes the messages of a history: groups in every mode, and the instances of each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.history.messages import FEW, ORDERED, PATTERN, TOPIC, shade_of, tag_of


@dataclass(frozen=True, slots=True)
class Taker:
    """A group that must have each of its messages once, of a broadcast an instance."""

    group: str
    mode: str
    topic: str
    instances: tuple[str, ...] = ("x",)
    guest: bool = False
    """Whether another instance joins and leaves again and again."""
    tag: str = ""
    """It has only messages with this tag."""
    batch: int | None = None
    """Its handler takes so many messages at a time; that of its guest takes batches in any case."""
    shade: str = ""
    """It has only messages whose header `shade` says so."""

    @property
    def who(self) -> str:
        """As the rows of its effects name it."""
        return f"{self.group}@{self.instances[0]}" if self.mode == "broadcast" else self.group

    @property
    def filter(self) -> str:
        return f'"shade" in headers && headers.shade == "{self.shade}"' if self.shade else ""

    def wants(self, number: str, topic: str) -> bool:
        """Whether it must have a message, which is in this topic."""
        return (
            (topic != TOPIC if self.topic == PATTERN else topic == self.topic)
            and self.tag in ("", tag_of(number))
            and self.shade in ("", shade_of(number))
        )


BATCH = 8
TAKERS = (
    Taker("shared", "shared", TOPIC),
    Taker("ordered", "ordered", ORDERED),
    Taker("failover", "failover", FEW, instances=("x", "y")),
    Taker("exclusive", "exclusive", FEW, batch=BATCH),
    Taker("broadcast", "broadcast", FEW),
)
TAKERS_OF_KAFKA = (
    Taker("shared", "shared", TOPIC, guest=True),
    Taker("ordered", "ordered", ORDERED, guest=True),
    *TAKERS[2:],
    Taker("tagged", "shared", TOPIC, tag="red"),
    Taker("pattern", "ordered", PATTERN, shade="dark", guest=True),
)
IN_ORDER = frozenset(("ordered", "pattern"))
"""The groups that receive the messages of a key in order."""
