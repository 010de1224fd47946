"""Wheels of delayed messages: none moves late, and a slot's next turn never comes before what is late for this one."""

from __future__ import annotations

import random

import pytest

from notify.movers.sinks.delays.delayed_record import delayed_headers, delayed_of
from notify.movers.sinks.delays.wheels import DAY_US, LATE_US, SECOND_US, SHAPE, WHEELS, Place, Wheel, wheels_of
from notify.protocol.limits import LIMITS

NOW_US = 1_795_000_000 * SECOND_US


def test_the_finest_wheel_that_covers_the_time_takes_a_record() -> None:
    assert WHEELS.place(NOW_US, NOW_US) is None and WHEELS.place(0, NOW_US) is None
    for wheel, finer in zip(WHEELS.wheels, (None, *WHEELS.wheels), strict=False):
        for ahead_us in (finer.horizon_us + 1 if finer else 1, wheel.horizon_us):
            place = WHEELS.place(NOW_US + ahead_us, NOW_US)
            assert place == (wheel.topic, (NOW_US + ahead_us) // wheel.slot_us % wheel.slots)
    assert WHEELS.wheels[-1].horizon_us >= LIMITS.delay_seconds * SECOND_US


def test_a_record_beyond_the_last_horizon_is_placed_again_before_it_is_due() -> None:
    due_us = NOW_US + 400 * DAY_US
    now_us, moves = NOW_US, 0
    while (place := WHEELS.place(due_us, now_us)) is not None:
        now_us = max(
            now_us + DAY_US, WHEELS.moves_us(place.topic, due_us) if place.topic != "notify-delayed.days" else 0
        )
        moves += 1
        assert moves < 1000
    assert now_us >= due_us


def test_a_way_through_the_wheels_ends_when_the_record_is_due() -> None:
    chance = random.Random(3)
    for _ in range(300):
        due_us, now_us = NOW_US + chance.randrange(1, 40 * DAY_US), NOW_US
        way = []
        while (place := WHEELS.place(due_us, now_us)) is not None:
            way.append(place.topic)
            now_us = max(now_us, WHEELS.moves_us(place.topic, due_us))
        assert now_us == due_us and len(way) == len(set(way)), "each wheel once, and nothing early or late"


def test_a_whole_slot_may_move_before_its_time() -> None:
    for wheel, finer in zip(WHEELS.wheels[1:], WHEELS.wheels, strict=False):
        assert finer.horizon_us > wheel.slot_us and wheel.ahead_us == finer.horizon_us


@pytest.mark.parametrize("wheel", WHEELS.wheels, ids=[name for name, *_ in SHAPE])
def test_a_late_record_is_released_before_the_next_turn(wheel: Wheel) -> None:
    """The first record that a slot takes for its next turn is placed later than any of this turn becomes visible."""
    last_us = wheel.slot_us * (NOW_US // wheel.slot_us + 1) - 1
    next_turn_us = last_us + 1 + (wheel.slots - 1) * wheel.slot_us
    slot = last_us // wheel.slot_us % wheel.slots
    assert next_turn_us // wheel.slot_us % wheel.slots == slot
    assert next_turn_us - wheel.horizon_us >= last_us + LATE_US


@pytest.mark.parametrize(
    "shape", [(("a", SECOND_US, 63),), (("a", SECOND_US, 100), ("b", 60 * SECOND_US, 9))], ids=["no horizon", "a gap"]
)
def test_wheels_that_do_not_reach_into_each_other_are_refused(shape: tuple[tuple[str, int, int], ...]) -> None:
    with pytest.raises(ValueError):
        wheels_of(shape)
    assert wheels_of(((*shape[0][:2], 200), ("b", 60 * SECOND_US, 9)), "p").place(NOW_US + 1, NOW_US) == Place(
        "p.a", NOW_US // SECOND_US % 200
    )


class Record:
    """A record of Kafka's client."""

    def __init__(self, headers: list[tuple[str, bytes | None]]) -> None:
        self._headers = headers

    def headers(self) -> list[tuple[str, bytes | None]]:
        return self._headers

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"


def test_headers_of_the_message_are_no_others() -> None:
    """Headers of a message may have the names of those that say when it is due."""
    own = [("notify-due", b"0"), ("notify-topic", b"mine"), ("a", b"b")]
    delayed = delayed_of(Record(delayed_headers(own, NOW_US, "t")))  # type: ignore[arg-type]
    assert delayed is not None
    assert (delayed.topic, delayed.due_us, delayed.headers, delayed.key) == ("t", NOW_US, own, b"k")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("a", b"b")],
        [("notify-due", b"12"), ("notify-topic", b"\xff")],
        *([("notify-due", due), ("notify-topic", b"t")] for due in (b"x", b"-1", b"9" * 400, "²".encode(), None)),
    ],
)
def test_an_invalid_delayed_record_is_recognised(headers: list[tuple[str, bytes | None]]) -> None:
    """One whose topic is not a text ended the releaser of its slot, and then the next one's."""
    assert delayed_of(Record(headers)) is None
