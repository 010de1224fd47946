"""States of groups in words, and the order of their list."""

from __future__ import annotations

from typing import Any

import pytest

from notify.admin_api.queue_rows import sorted_groups, state

CALM: dict[str, Any] = {
    "name": "calm", "lag": 1, "consumers": 1, "paused": False, "oldest_seconds": 0.2, "dead_letters": 0,
    "is_failing": False, "latency": {"commit_to_ack": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "up to date"),
        ({"oldest_seconds": 5.0}, "behind"),
        ({"oldest_seconds": None}, "up to date"),
        ({"oldest_seconds": None, "lag": 100}, "behind"),
        ({"lag": 0, "oldest_seconds": 9.0}, "up to date"),
        ({"dead_letters": 3, "oldest_seconds": 60.0}, "dead letters"),
        ({"dead_letters": 3, "is_failing": True}, "failing"),
        ({"consumers": 0, "is_failing": True}, "no consumer"),
        ({"consumers": 0, "lag": 0}, "up to date"),
        ({"consumers": 0, "paused": True}, "paused"),
    ],
)
def test_the_state_of_a_group_is_what_needs_an_operator_most(row: dict[str, Any], words: str) -> None:
    assert state(CALM | row) == words


def test_groups_that_fail_now_come_before_those_that_are_only_behind() -> None:
    rows = [
        CALM | {"name": "slow", "lag": 60, "oldest_seconds": 38.0},
        CALM | {"name": "old letters", "dead_letters": 900},
        CALM | {"name": "fails", "dead_letters": 203, "is_failing": True},
        CALM | {"name": "alone", "consumers": 0},
        CALM | {"name": "paused", "paused": True, "lag": 5, "consumers": 0, "oldest_seconds": 1.0},
    ]
    names = [row["name"] for row in sorted_groups(rows, "pain", 10)]
    assert names == ["alone", "fails", "slow", "paused", "old letters"]
