"""Waits between attempts double up to a bound, are spread at random, and begin again after a success."""

from __future__ import annotations

import random

from notify.runtime.backoff import SPREAD, Backoff


def test_waits_double_up_to_the_bound_and_are_spread() -> None:
    backoff = Backoff(0.1, 1.0)
    for least in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert least <= backoff.next() <= least * (1 + SPREAD)
    backoff.reset()
    assert 0.1 <= backoff.next() <= 0.1 * (1 + SPREAD)


def test_two_that_failed_together_do_not_wait_alike() -> None:
    first, second = Backoff(1.0, 60.0), Backoff(1.0, 60.0)
    assert [first.next() for _ in range(5)] != [second.next() for _ in range(5)]


def test_the_applications_random_numbers_stay_as_they_are() -> None:
    """A service that seeds `random`, and Hypothesis, met another sequence while a thread of Notify waited."""
    before = random.getstate()
    Backoff(1.0, 60.0).next()
    assert random.getstate() == before
