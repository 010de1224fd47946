"""/metrics shows any user's name as a label; alert rules and the dashboard ask only for metrics that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from notify.server.latency import KINDS
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
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


# --- alert rules fire when they should; rules and dashboard ask only for metrics that a server shows ----------------

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"


def test_alert_rules_fire_on_what_they_are_for() -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}}' in (MONITORING / "alerts.yml").read_text()
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (it is in Debian's package prometheus)")
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = subprocess.run(
            [promtool, *command], cwd=MONITORING, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rules = {rule["alert"] for rule in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]}
    tested = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"][0]["alert_rule_test"]
    assert {case["alertname"] for case in tested} == rules


def test_they_ask_only_for_metrics_that_there_are(server: ServerProcess) -> None:
    shown = set(re.findall(r"^# TYPE (\w+)", call(server.url, "GET", "/metrics"), re.MULTILINE))
    asked = [rule["expr"] for rule in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]]
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    asked += [target["expr"] for panel in panels for target in panel["targets"]]
    used = {name for expression in asked for name in re.findall(r"\bnotify_\w+", expression)}
    used = {re.sub("_bucket$", "", name) for name in used}  # of a histogram
    assert used <= shown, used - shown
    assert len(used) > 20


def test_every_rule_leads_to_what_to_do() -> None:
    """They led to a host that nobody has, in 15 places, and to the paths of another kind of site."""
    (label,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["global"]["external_labels"]
    assert label == "notify_docs"
    assert "\nuse_directory_urls: false\n" in (MONITORING.parents[1] / "mkdocs.yml").read_text()
    for rule in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]:
        site, _, place = rule["annotations"]["runbook_url"].partition("/")
        page, _, anchor = place.partition(".html#")
        assert site == "{{ $externalLabels.notify_docs }}"
        headings = re.findall(r"^#+ (.+)$", (MONITORING.parent / f"{page}.md").read_text(), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, rule["alert"]


def test_the_dashboard_shows_dead_letters() -> None:
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    assert any("notify_dead_letters" in target["expr"] for panel in panels for target in panel["targets"])


def test_the_dashboard_shows_every_histogram() -> None:
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    asked = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    assert [kind.name for kind in KINDS if f"notify_{kind.name}_seconds_bucket" not in asked] == []


def test_every_alarm_has_a_rule(server: ServerProcess) -> None:
    """Damage of the log, refused messages and a Kafka that is unreachable had none."""
    alarms = set(re.findall(r'^notify_alarms\{alarm="(\w+)"', call(server.url, "GET", "/metrics"), re.MULTILINE))
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    (others,) = [rule["expr"] for rule in rules if rule["alert"] == "NotifyAlarm"]
    elsewhere = set(re.findall(r"\w+", others.partition('!~"')[2].partition('"')[0]))
    assert elsewhere <= alarms and "damage" in elsewhere and "kafka" not in elsewhere
    of_metrics = {"in_doubt", "parked", "lag_growing", "consumers", "disk", "bridge"}
    named = set(re.findall(r'notify_alarms\{alarm="(\w+)"', " ".join(rule["expr"] for rule in rules)))
    assert elsewhere == named | of_metrics


def test_metrics_follow_the_conventions(server: ServerProcess) -> None:
    """Names follow https://prometheus.io/docs/practices/naming; promtool agrees where it is installed."""
    text = call(server.url, "GET", "/metrics")
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)", text, re.MULTILINE))
    assert all(name.startswith("notify_") and name.endswith("_total") == (kind == "counter")
               for name, kind in kinds.items())  # fmt: skip
    helped = set(re.findall(r"^# HELP (\w+) \S", text, re.MULTILINE))
    assert helped == set(kinds)
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
