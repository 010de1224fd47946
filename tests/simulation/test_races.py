"""Races of check, outcome, late commit, restart and delivery: 100 seeds, 2,000 in `make test-long`."""

from __future__ import annotations

import pytest

from tests.simulation.run import simulate

BATCH, SHORT, LONG = 100, 100, 2000
SEEDS = [pytest.param(n, marks=[pytest.mark.long] if n >= SHORT else []) for n in range(0, LONG, BATCH)]


@pytest.mark.parametrize("first", SEEDS)
def test_no_race_breaks_a_promise(first: int) -> None:
    """Promises 3 to 8, of a group in mode shared and one of another mode."""
    broken = {seed: violations for seed in range(first, first + BATCH) if (violations := simulate(seed))}
    assert broken == {}


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(11, naive=True) == simulate(11, naive=True)


def test_a_naive_check_is_caught() -> None:
    """The planted fault: a plain SELECT as the check rolls back what commits a moment later."""
    violations = (violation for seed in range(60) for violation in simulate(seed, naive=True))
    assert any(violation.startswith("LOST") for violation in violations)


def test_delivery_out_of_order_is_caught() -> None:
    """The planted fault: a key's messages are in flight side by side."""
    violations = (violation for seed in range(20) for violation in simulate(seed, unordered=True))
    assert any(violation.startswith("DISORDER") for violation in violations)
