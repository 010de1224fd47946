"""/metrics shows a user's name as a label's value, whatever characters it has."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from notify.testing import InMemoryServer
from tests.support.groups import publish, subscribe
from tests.support.http import call, post


def samples(url: str) -> dict[str, list[dict[str, Any]]]:
    """The labels of all samples by the metric's name, as Prometheus reads them."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for family in text_string_to_metric_families(str(call(url, "GET", "/metrics"))):
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(dict(sample.labels))
    return by_name


def test_no_name_of_an_instance_makes_metrics_of_its_own() -> None:
    """An instance's name is any text, and part of its group's name where a topic is broadcast to it."""
    name = 'i"} 1\nnotify_parked_transactions 99\nnotify_made_up{a="\\'
    with InMemoryServer() as server:
        subscribe(server.url, "g", "t", mode="broadcast")
        post(server.url, "/v1/groups/g/receive", {"instance": name, "max": 1, "wait": 0, "lease": 30})
        publish(server.url, "t", ["x"])
        by_name = samples(server.url)
        assert "notify_made_up" not in by_name
        assert by_name["notify_parked_transactions"] == [{}] and by_name["notify_published_total"] == [{}]
        assert {"group": f"g@{name}", "topic": "t"} in by_name["notify_lag_messages"]
