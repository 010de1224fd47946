"""The short forms of the campaigns over delayed messages and over order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import ordered
from tools.bench import delayed


@pytest.mark.crash
def test_delayed_messages_over_two_kills() -> None:
    came, _ = delayed.run(6_000, span=3, lead=1, kills=2)
    assert len(came.seen) == 6_000


@pytest.mark.crash
def test_order_per_key_with_killed_consumers() -> None:
    ordered.run(15_000, keys=500, consumers=3, kills=6, seed=5)


def test_an_inversion_is_found(tmp_path: Path) -> None:
    """The planted fault: the second message of a key before the first one's ack."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text('[1, [["r", "k", 0]]]\n[2, [["a", "k", 0]]]\n[3, [["r", "k", 1]]]\n[4, [["r", "k", 1]]]\n[5, ')
    assert ordered.inversions([good]) == (0, 2)
    bad.write_text('[1, [["r", "k", 0]]]\n[2, [["r", "k", 1]]]\n')
    assert ordered.inversions([bad]) == (1, 2)
