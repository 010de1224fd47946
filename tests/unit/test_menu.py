"""The console's menu: what it counts, what it does while the server does not know, and where an alarm leads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from notify.errors import NotFound
from notify.server.console.api import status_of
from notify.server.console.filters import group_of, page_of, together
from notify.server.console.rendering import menu_counts, rendered


@pytest.mark.parametrize(
    ("waiting", "count"),
    [
        ({"in_doubt": 1}, (1, "transaction without an outcome", "")),
        ({"in_doubt": 1, "parked": 1}, (2, "transactions without an outcome", "bad")),
    ],
)
def test_counts_have_the_right_number(waiting: dict[str, int], count: tuple[int, str, str]) -> None:
    assert menu_counts({"alarms": [], "waiting": waiting}) == {"/transactions": count}


def test_the_menu_counts_the_groups_that_have_an_alarm() -> None:
    """It counted held keys there: an operator read the number as one of groups, and found no key on the page."""
    alarms = [
        {"name": name, "target": target, "severity": severity}
        for name, target, severity in (
            ("dead_letters", "mail", "warning"),
            ("no_consumers", "mail", "critical"),
            ("unread_topic", "points/order.placed", "warning"),
            ("bridge", "shop", "warning"),
        )
    ]
    counts = menu_counts({"alarms": alarms, "waiting": {"held_keys": 9}})
    assert counts["/groups"] == (2, "groups with alarms", "bad")
    assert menu_counts({"alarms": alarms[:1], "waiting": {}})["/groups"] == (1, "group with an alarm", "warn")


@pytest.mark.parametrize("unknown", [None, {"missing": ["worker-2"]}])
def test_counts_that_are_not_known_are_marked(unknown: dict[str, Any] | None) -> None:
    known = {"name": "", "alarms": [], "waiting": {}}

    def page(status: dict[str, Any] | None) -> str:
        return rendered("error.html", "/x", "", {}, title="x", error=NotFound("x"), status=status)

    assert "data-uncounted" in page(unknown and known | unknown) and "data-uncounted" not in page(known)


def test_a_fault_of_the_counts_takes_no_page_away() -> None:
    class Faulty:
        async def get(self, path: str) -> Any:
            raise RuntimeError("a fault")

    assert asyncio.run(status_of(Faulty())) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "target", "page", "group"),
    [
        ("unread_topic", "points/order.placed", "/groups/points", "points"),
        ("filter", "points/order.placed", "/groups/points", "points"),
        ("dead_letters", "points", "/groups/points/dead-letters", "points"),
        ("kafka", "points", "/nodes", "points"),
        ("schedule", "points", "/schedules", ""),
        ("bridge", "points", "/nodes", ""),
        ("in_doubt", "points", "/transactions?producer_group=points", ""),
        ("disk", "", "", ""),
    ],
)
def test_an_alarm_leads_to_the_page_of_what_it_is_about(name: str, target: str, page: str, group: str) -> None:
    alarm = {"name": name, "target": target}
    assert (page_of(alarm), group_of(alarm)) == (page, group)


def test_alarms_of_a_kind_stand_together() -> None:
    """Their meaning stands once below them; it stood again below each that was raised after another kind."""
    raised = [("no_consumers", "a"), ("dead_letters", "a"), ("bridge", "shop"), ("dead_letters", "b")]
    shown = together([{"name": name, "target": target} for name, target in raised])
    kinds = [[(alarm["name"], alarm["target"]) for alarm in kind] for kind in shown]
    assert kinds == [[raised[0]], [raised[1], raised[3]], [raised[2]]]
