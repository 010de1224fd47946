"""The campaigns of `make crash-cluster` and `make crash-bridge`, in short."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from notify.testing.reachable import NotAvailable
from tests.crash import bridge, cluster
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database

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
