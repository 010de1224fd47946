"""The memory of deliveries stays within its bounds, and says nothing that is not certain."""

from __future__ import annotations

import pytest

from notify.server.delivery.ack_memory import (
    MOST_FAILED,
    MOST_RUNS,
    MOST_TRACED,
    TRACE_CHARACTERS,
    AckMemory,
    Failed,
    Holder,
)


def holder(recent: AckMemory, topic: str, queue: int, offset: int) -> Holder | None:
    """The consumer that group g's message was acknowledged by."""
    return recent.holders_of(topic, queue, offset).get("g")


@pytest.mark.long
def test_the_oldest_are_forgotten_and_since_when_is_said() -> None:
    recent = AckMemory(0)
    for n in range(MOST_RUNS + 10):
        recent.acknowledged(("g", "t", 0, [(n * 2, 1)], [(n * 2, n * 2, "i", n + 1)], n + 1))
    assert recent.since_us == 10
    assert holder(recent, "t", 0, 18) is None
    assert holder(recent, "t", 0, 20) == Holder("i", 11)
    # One request with very many runs takes as much room as many requests.
    runs = [(n * 2, 1) for n in range(MOST_RUNS)]
    recent.acknowledged(("g", "u", 0, runs, [(0, runs[-1][0], "i", 1)], 10**9))
    assert holder(recent, "t", 0, 2 * (MOST_RUNS + 9)) is None and holder(recent, "u", 0, 8) is not None


def test_nothing_is_said_that_is_not_certain() -> None:
    recent = AckMemory(0)
    recent.acknowledged(("g", "t", 0, [(0, 10)], [(0, 8, "one", 1), (1, 9, "two", 2)], 3))
    assert holder(recent, "t", 0, 0) is None  # of several consumers
    recent.acknowledged(("g", "t", 1, [(0, 10)], [(0, 6, "one", 1), (4, 8, "one", 2)], 3))
    assert holder(recent, "t", 1, 0) == Holder("one", 1)
    assert holder(recent, "t", 1, 5) == Holder("one", 0) == holder(recent, "t", 1, 9)
    assert holder(recent, "t", 2, 0) is None is holder(recent, "u", 1, 0)


def test_acknowledgements_do_not_push_failures_out() -> None:
    recent = AckMemory(0)
    recent.failed(Failed("g", "t", 0, 7, 1, "i", 1, 2, "why"))
    for n in range(MOST_RUNS * 2):
        recent.acknowledged(("g", "t", 0, [(n, 1)], [], n))
    assert [f.reason for f in recent.failures_of("t", 0, 7)] == ["why"]
    for n in range(MOST_FAILED):
        recent.failed(Failed("g", "t", 0, 8, n, "i", 1, 2, ""))
    assert recent.failures_of("t", 0, 7) == [] and len(recent.failures_of("t", 0, 8)) == MOST_FAILED


def test_tracebacks_have_a_bound_of_their_own() -> None:
    recent = AckMemory(0)
    fit = MOST_TRACED // TRACE_CHARACTERS
    for n in range(fit + 10):
        recent.failed(Failed("g", "t", 0, n, 1, "i", 1, 2, "why", trace="x" * TRACE_CHARACTERS))
    assert [(f.reason, f.trace) for f in recent.failures_of("t", 0, 9)] == [("why", "")], "its reason stays"
    assert [len(f.trace) for f in recent.failures_of("t", 0, 10)] == [TRACE_CHARACTERS]
    for n in range(MOST_FAILED):
        recent.failed(Failed("g", "u", 0, n, 1, "i", 1, 2, "why"))
    assert recent.failures_of("t", 0, fit + 9) == [] and recent.failures_of("u", 0, 0) != []
    for n in range(MOST_FAILED + fit + 10):
        recent.failed(Failed("g", "v", 0, n, 1, "i", 1, 2, "why", trace="x" * TRACE_CHARACTERS))
    last = MOST_FAILED + fit + 9
    kept = [len(recent.failures_of("v", 0, n)[0].trace) for n in (last, last - fit + 1, last - fit)]
    assert kept == [TRACE_CHARACTERS, TRACE_CHARACTERS, 0] and recent.failures_of("u", 0, MOST_FAILED - 1) == []
