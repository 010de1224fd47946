"""The console's page of an alarm, and the group that an alarm is about."""

from __future__ import annotations

import pytest

from notify.server.console.filters import group_of, page_of


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
