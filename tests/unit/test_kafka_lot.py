"""How many records a consumer over Kafka polls at a time."""

from __future__ import annotations

from notify.client.kafka.lot import MOST, QUICK_SECONDS, Lot


def test_quick_handlers_get_more_at_a_time_and_slow_ones_as_few_as_batch_says() -> None:
    lot, now = Lot(32), 100.0
    asked = [lot.next(now, 0)]
    for _ in range(7):
        now += QUICK_SECONDS / 2
        asked.append(lot.next(now, asked[-1]))
    assert asked == [32, 64, 128, 256, 512, MOST, MOST, MOST]
    for _ in range(7):
        now += QUICK_SECONDS * 2
        asked.append(lot.next(now, asked[-1]))
    assert asked[8:] == [500, 250, 125, 62, 32, 32, 32]


def test_few_records_that_come_one_by_one_are_no_whole_lot() -> None:
    lot = Lot(32)
    assert {lot.next(100 + n * QUICK_SECONDS / 10, 1) for n in range(20)} == {32}


def test_a_batch_of_one_and_a_large_one() -> None:
    assert (Lot(1).low, Lot(10_000).low) == (1, 5001)
    one, large = Lot(1), Lot(10_000)
    assert [one.next(100.0, 0), one.next(100.0, 1), one.next(100.0, 2)] == [1, 2, 4]
    assert [large.next(100.0, 0), large.next(100.0, 10_000)] == [10_000, 10_000]
