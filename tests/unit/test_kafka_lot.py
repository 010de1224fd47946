"""How many records a consumer over Kafka polls at a time."""

from __future__ import annotations

from notify.client.kafka.lot import MOST, QUICK_SECONDS, Lot


def asked(lot: Lot, polls: int, *, handled_in: float, polled_in: float = 0.0, came: int | None = None) -> list[int]:
    """The records that each of so many polls asks for, after a first one. `came` None: each brings them all."""
    now = 100.0
    size = lot.next(now)
    sizes = []
    for _ in range(polls):
        now += polled_in
        lot.came(now, size if came is None else came)
        now += handled_in
        size = lot.next(now)
        sizes.append(size)
    return sizes


def test_quick_handlers_get_more_at_a_time_and_slow_ones_as_few_as_batch_says() -> None:
    lot = Lot(32)
    assert asked(lot, 7, handled_in=QUICK_SECONDS / 2) == [64, 128, 256, 512, 1024, MOST, MOST]
    assert lot.half == MOST // 2
    assert asked(lot, 6, handled_in=QUICK_SECONDS * 2) == [1000, 500, 250, 125, 62, 32]
    assert lot.half == 0


def test_a_poll_that_takes_long_does_not_make_handlers_slow() -> None:
    assert asked(Lot(32), 3, handled_in=QUICK_SECONDS / 2, polled_in=QUICK_SECONDS * 5) == [64, 128, 256]


def test_few_records_that_come_one_by_one_are_no_whole_lot() -> None:
    assert set(asked(Lot(32), 20, handled_in=QUICK_SECONDS / 10, came=1)) == {32}


def test_a_batch_of_one_and_a_large_one() -> None:
    assert (Lot(1).low, Lot(8).low, Lot(10_000).low) == (1, 5, 17)
    assert asked(Lot(1), 3, handled_in=0.0) == [2, 4, 8]
    assert asked(Lot(10_000), 3, handled_in=0.0) == [10_000, 10_000, 10_000]
