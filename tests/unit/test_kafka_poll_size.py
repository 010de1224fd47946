"""How many records a consumer over Kafka polls at a time."""

from __future__ import annotations

from notify.client.kafka.feed import MOST_POLLED, QUICK_SECONDS, PollSize


def asked(
    poll: PollSize, polls: int, *, handled_in: float, polled_in: float = 0.0, came: int | None = None
) -> list[int]:
    """The records that each of so many polls asks for, after a first one. `came` None: each brings them all."""
    now = 100.0
    size = poll.next(now)
    sizes = []
    for _ in range(polls):
        now += polled_in
        poll.came(now, size if came is None else came)
        now += handled_in
        size = poll.next(now)
        sizes.append(size)
    return sizes


def test_quick_handlers_get_more_at_a_time_and_slow_ones_as_few_as_batch_says() -> None:
    poll = PollSize(32)
    assert asked(poll, 7, handled_in=QUICK_SECONDS / 2) == [64, 128, 256, 512, 1024, MOST_POLLED, MOST_POLLED]
    assert poll.half == MOST_POLLED // 2
    assert asked(poll, 6, handled_in=QUICK_SECONDS * 2) == [1000, 500, 250, 125, 62, 32]
    assert poll.half == 0


def test_a_poll_that_takes_long_does_not_make_handlers_slow() -> None:
    assert asked(PollSize(32), 3, handled_in=QUICK_SECONDS / 2, polled_in=QUICK_SECONDS * 5) == [64, 128, 256]


def test_few_records_that_come_one_by_one_are_no_whole_poll() -> None:
    assert set(asked(PollSize(32), 20, handled_in=QUICK_SECONDS / 10, came=1)) == {32}


def test_a_batch_of_one_and_a_large_one() -> None:
    assert (PollSize(1).low, PollSize(8).low, PollSize(10_000).low) == (1, 5, 17)
    assert asked(PollSize(1), 3, handled_in=0.0) == [2, 4, 8]
    assert asked(PollSize(10_000), 3, handled_in=0.0) == [10_000, 10_000, 10_000]
