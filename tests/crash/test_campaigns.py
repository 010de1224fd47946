"""The campaigns over servers, bridges, schedules and two versions, in short, and the faults that each must find."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from notify.testing.reachable import NotAvailable
from tests.crash import bridge, cluster, proxy, rolling, schedules
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.versions import earlier_version

__all__ = ["earlier_version"]

pytestmark = pytest.mark.crash


@pytest.mark.parametrize(
    "database",
    ["mysql", pytest.param("mariadb", marks=pytest.mark.long), pytest.param("postgresql", marks=pytest.mark.long)],
)
def test_servers_are_killed_and_nothing_is_lost(database: str, database_urls: dict[str, str], directory: Path) -> None:
    """Promises 1 to 3 over three stateless servers. How many callers notice is measured by `make crash-cluster`."""
    with ExitStack() as stack:
        url = stack.enter_context(empty_database(database, database_urls, directory))
        made = cluster.Cluster(url, directory, stack)
        moments = cluster.by_progress(kills=2, transactions=60)
        result = asyncio.run(cluster.run(made, moments, callers=4, seed=5, half_seconds=PATIENCE_SECONDS))
    assert result["kills"] == 2 and result["acknowledged"] >= 180, result
    assert cluster.broken(result) == [], result


def test_the_verdict_catches_what_a_cluster_may_do_wrong() -> None:
    good = {"lost": 0, "doubled": 0, "ghosts": 0, "success": 1.0, "slowest_seconds": 0.5, "errors": {}}
    assert cluster.broken(good) == [] == cluster.verdict(good)
    for planted in ({"lost": 1}, {"doubled": 1}, {"ghosts": 1}):
        assert cluster.broken(good | planted) and cluster.verdict(good | planted), planted
    for slow in ({"success": 0.99}, {"slowest_seconds": 9.0}):
        assert cluster.verdict(good | slow) and not cluster.broken(good | slow), slow


@pytest.mark.long
@pytest.mark.parametrize("database", ["mariadb", "mysql", "postgresql"])
def test_a_bridge_is_killed_while_its_source_changes(database: str, directory: Path) -> None:
    """Promise 13: no gap, no duplicate, no reorder per key."""
    with ExitStack() as stack:
        try:
            result = bridge.run(
                directory, stack, database, durable=False, pause=0.5, kills=2, rotations=1, ddls=2, restarts=1,
                failovers=int(database != "postgresql"), seed=3,
            )  # fmt: skip
        except NotAvailable as reason:
            pytest.skip(str(reason))
    result["done"].pop("ddl refused", None)
    failed_over = {} if database == "postgresql" else {"fail over": 1}
    assert result["done"] == {"kill": 2, "rotate": 1, "ddl": 2, "restart": 1} | failed_over
    assert result["violations"] == [], result


def test_the_history_catches_what_a_bridge_may_do_wrong() -> None:
    history = bridge.History({"k": [0, 1, 2, 4]}, {"k": 5})
    assert bridge.violations(history, {"k": [0, 1, 2, 3, 4]}) == []
    assert bridge.violations(history, {"k": [0, 1, 2, 4]}) == []
    for numbers, violation in (
        ([0, 2, 4], "lost"),
        ([0, 1, 1, 2, 4], "twice"),
        ([0, 2, 1, 4], "order"),
        ([0, 1, 2, 4, 5], "never"),
    ):
        assert any(violation in bad for bad in bridge.violations(history, {"k": numbers})), violation


# --- the short form of `make crash-proxy` ---------------------------------------------------------------------------


def test_a_shop_behind_nginx_goes_on_while_its_server_is_killed(tmp_path: Path) -> None:
    try:
        seen, wrong = proxy.run(tmp_path, 3, 0.5)
    except NotAvailable as reason:
        pytest.skip(str(reason))
    assert not wrong and seen.kills == 3


# --- the short form of the campaign over schedules, and what its comparison finds -----------------------------------


@pytest.mark.long  # tests/integration/test_schedules.py kills at the points that matter
def test_each_instant_once_over_kills(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as storage:
        report = schedules.run(storage, tmp_path, schedules=4, kills=5, pause=0.8, seed=3)
    assert schedules.broken(report) == [] and report["messages"] > 20, report


def test_the_campaign_finds_planted_faults_of_schedules() -> None:
    """The planted faults: an instant that is missing, and one that is there twice."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    seconds = [noon + timedelta(seconds=n) for n in range(10)]
    assert schedules.wrong({"a": seconds}, {}) == {"lost": 0, "doubled": 0}
    assert schedules.wrong({"a": seconds[:4] + seconds[6:]}, {}) == {"lost": 2, "doubled": 0}
    assert schedules.wrong({"a": seconds[:4] + seconds[3:]}, {}) == {"lost": 0, "doubled": 1}
    resumed = {"a": [seconds[5]]}
    assert schedules.wrong({"a": seconds[:4] + seconds[6:]}, resumed) == {"lost": 0, "doubled": 0}
    assert schedules.wrong({"b": seconds[:4] + seconds[6:]}, resumed) == {"lost": 2, "doubled": 0}


# --- SQL servers of both versions beside each other under load, upgraded and taken back one by one ------------------


def rolled(
    database: str, urls: Mapping[str, str], earlier: Path, directory: Path, rounds: int, each: int
) -> dict[str, Any]:
    with ExitStack() as stack:
        url = stack.enter_context(empty_database(database, urls, directory))
        made = rolling.Rolling(url, earlier, directory, stack)
        steps = [(made.a, made.now), (made.a, made.earlier)]
        if rounds > 1:
            # All of this version, then all of the earlier one.
            steps = [(made.a, made.now), (made.b, made.earlier), (made.a, made.earlier), (made.b, made.now)] * rounds
        return asyncio.run(rolling.run(made, steps, each, callers=4))


@pytest.mark.long
@pytest.mark.parametrize("database", ["mariadb", pytest.param("postgresql", marks=pytest.mark.long)])
def test_a_server_is_upgraded_and_taken_back_under_load(
    database: str, database_urls: Mapping[str, str], earlier_version: Path, directory: Path
) -> None:
    """Promises 1 to 3 over two versions: each transaction has the outcome that was meant, once, at both servers."""
    result = rolled(database, database_urls, earlier_version, directory, rounds=1, each=30)
    assert rolling.broken(result) == []
    assert result["refused"] == {} and result["transactions"] >= 90 and result["left_to_checks"] > 0


@pytest.mark.long
@pytest.mark.parametrize("database", ["mariadb", "postgresql"])
def test_servers_are_upgraded_and_taken_back_again_and_again(
    database: str, database_urls: Mapping[str, str], earlier_version: Path, directory: Path
) -> None:
    result = rolled(database, database_urls, earlier_version, directory, rounds=4, each=300)
    assert rolling.broken(result) == []
    assert result["refused"] == {} and result["transactions"] >= 17 * 300


def test_the_rolling_campaign_catches_planted_faults() -> None:
    good: dict[str, Any] = {
        "meant": {"a": "COMMIT", "b": "ROLLBACK"}, "unsure": set(), "moved": Counter("a"), "failures": [],
        "states": {"a": [200, 409, 200, 409], "b": [200, 409, 200, 409]},
    }  # fmt: skip
    assert rolling.broken(good) == []
    planted: list[dict[str, Any]] = [
        {"moved": Counter()}, {"moved": Counter("aa")}, {"moved": Counter("ab")}, {"moved": Counter("ax")},
        {"failures": ["500"]}, {"states": good["states"] | {"b": [409, 200, 200, 409]}},
    ]  # fmt: skip
    for fault in planted:
        assert rolling.broken(good | fault), fault
    seen = rolling.Seen(away={"a": [[0.0, 5.0]]}, failures=[("a", 1.0, "503"), ("a", 6.0, "500"), ("b", 1.0, "500")])
    assert seen.failures_while_up() == ["a 500", "b 500"]
