"""Names of Notify's parts in Kafka: none is another's."""

from __future__ import annotations

from notify.kafka.groups import transactional_id


def test_no_two_groups_and_instances_have_one_transactional_id() -> None:
    """A group `a-b` with instance `c` fenced group `a` with instance `b-c`, and a group `control` the servers."""
    owners = [transactional_id(name) for name in ("control", "redrive-a", "bridge-shop", "a", "a-b")]
    members = [transactional_id("a", "b-c"), transactional_id("a-b", "c"), transactional_id("a@b", "c")]
    assert len({*owners, *members}) == len(owners) + len(members)
    others = ("notify-control", "notify-redrive-a", "notify-bridge-shop", "notify-delays")
    assert not set(owners) & set(others)
