"""The wheels in which delayed records wait: topics whose partitions are the slots of a timing wheel.

A hierarchical timing wheel (Varghese and Lauck 1987). A record is put into the finest wheel whose horizon covers the
time until the record is due, in the slot of that time. When the slot's time is near, the record moves to the next finer
wheel, and from the finest wheel to its topic. A slot is used again in each turn of its wheel. The horizon is shorter
than a turn, so that records that a slow transaction makes visible late are read before those of the slot's next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from notify.kafka.records import DELAYED

SECOND_US = 1_000_000
MINUTE_US, HOUR_US, DAY_US = 60 * SECOND_US, 3600 * SECOND_US, 86_400 * SECOND_US
LATE_US = 62 * SECOND_US
"""The longest time until a placed record becomes visible: a publisher's transaction ends after 60 s."""
SHAPE = (("seconds", SECOND_US, 128), ("minutes", MINUTE_US, 66), ("hours", HOUR_US, 28), ("days", DAY_US, 42))
"""The wheels, the finest first: name, a slot's width, and the number of slots, which is also that of partitions.

Each horizon is longer than a slot of the next wheel, and the last one is longer than the longest delay (40 days).
"""


class Place(NamedTuple):
    """A partition of a wheel's topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel; times are in microseconds."""

    topic: str
    slot_us: int
    slots: int
    horizon_us: int
    """How far in the future a record that is put here may be due."""
    ahead_us: int
    """How long before it is due a record moves to the next finer wheel: that wheel's horizon."""


@dataclass(frozen=True, slots=True)
class Wheels:
    """All wheels, the finest first."""

    wheels: tuple[Wheel, ...]

    def place(self, due_us: int, now_us: int) -> Place | None:
        """Where a record waits until `due_us`; None if it is due. Times are in microseconds since 1970."""
        ahead_us = due_us - now_us
        if ahead_us <= 0:
            return None
        for wheel in self.wheels:
            if ahead_us <= wheel.horizon_us:
                return Place(wheel.topic, due_us // wheel.slot_us % wheel.slots)
        wheel = self.wheels[-1]  # the record is placed again when this slot is read
        return Place(wheel.topic, (now_us + wheel.horizon_us) // wheel.slot_us % wheel.slots)

    def moves_us(self, topic: str, due_us: int) -> int:
        """When a record of a wheel's topic may move on, in microseconds since 1970. Raises KeyError."""
        for wheel in self.wheels:
            if wheel.topic == topic:
                return due_us - wheel.ahead_us
        raise KeyError(topic)


def wheels_of(shape: Sequence[tuple[str, int, int]] = SHAPE, prefix: str = DELAYED, late_us: int = LATE_US) -> Wheels:
    """Wheels of this shape, in topics `{prefix}.{name}`.

    Raises ValueError if a slot is longer than the horizon of the next finer wheel: its records could not move.
    """
    wheels: list[Wheel] = []
    for name, slot_us, slots in shape:
        ahead_us = wheels[-1].horizon_us if wheels else 0
        if wheels and slot_us > ahead_us:
            raise ValueError(f"a slot of {name} is longer than the horizon of the wheel before it")
        horizon_us = (slots - 1) * slot_us - late_us
        if horizon_us <= 0:
            raise ValueError(f"{slots} slots of {name} leave no horizon")
        wheels.append(Wheel(f"{prefix}.{name}", slot_us, slots, horizon_us, ahead_us))
    return Wheels(tuple(wheels))


WHEELS = wheels_of()
