"""The messages of a history: what each is follows from its number, so that nothing beside the number is recorded."""

from __future__ import annotations

import time
import zlib

from notify.client import Message
from tests.history.tables import Intent

TOPIC = "history"
ORDERED = "history.ordered"
FEW = "history.few"
"""The topic with few messages, for three groups in modes in which one instance does all the work."""
TOPICS = (TOPIC, ORDERED, FEW)
PATTERN = "history.*"
"""Stands for the topics ORDERED and FEW."""
_SHARES = ((FEW, 2), (ORDERED, 5), (TOPIC, 10))
"""Two of ten messages go to the first topic, three to the second, and the others to the last."""
_DELAYED = 25
"""One of so many messages of TOPIC, in which no order is promised, is delayed."""
_POISON = 250
_DEADLY = 2000


def drawn(what: str, number: str, of: int) -> int:
    """A number below `of`, by chance, but always the same one for a message."""
    return zlib.crc32(f"{what} {number}".encode()) % of


def topic_of(number: str) -> str:
    ten = drawn("topic", number, 10)
    return next(topic for topic, below in _SHARES if ten < below)


def tag_of(number: str) -> str:
    return "red" if drawn("tag", number, 4) == 0 else "blue"


def shade_of(number: str) -> str:
    return "dark" if drawn("shade", number, 2) else "light"


def is_delayed(number: str) -> bool:
    return topic_of(number) == TOPIC and drawn("delay", number, _DELAYED) == 0


def is_poison(number: str) -> bool:
    """Whether handlers fail on it until it is a dead letter, and take it once it was sent again."""
    return drawn("poison", number, _POISON) == 0


def is_deadly(number: str) -> bool:
    """Whether it kills the first processes that handle it."""
    return drawn("deadly", number, _DEADLY) == 0


def message(number: str, key: str, most_delay: float) -> Message:
    """`most_delay`: seconds that a delayed message waits at most, 0: none waits."""
    delay = None
    if most_delay and is_delayed(number):
        # Most are short; one of five waits as long as any.
        delay = most_delay if drawn("long", number, 5) == 0 else 1.0 + drawn("seconds", number, 40) / 10
    body = {"number": number, "key": key, "not_before": time.time() + (delay or 0.0)}
    return Message(
        topic_of(number), body, key=key, tag=tag_of(number), headers={"shade": shade_of(number)}, delay=delay
    )


def messages(intent: str, key: str, most_delay: float, count: int = 1) -> list[Message]:
    """The messages of an intent, whose numbers are `{intent}.{n}`."""
    return [message(f"{intent}.{n}", key, most_delay) for n in range(count)]


def rows(intent: str, key: str, count: int = 1) -> list[Intent]:
    """The business rows of an intent: one for each message."""
    return [Intent(number=f"{intent}.{n}", key=key, topic=topic_of(f"{intent}.{n}")) for n in range(count)]
