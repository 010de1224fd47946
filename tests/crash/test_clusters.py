"""The campaigns of `make crash-cluster` and `make crash-bridge`, in short."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.crash import bridge, cluster
from tests.support.databases import NotAvailable, empty_database

pytestmark = pytest.mark.crash


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short: MariaDB's socket lies in it."""
    made = Path(tempfile.mkdtemp(prefix="notify-c-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize("database", ["mariadb", "postgresql"])
def test_servers_are_killed_and_nobody_notices(database: str, database_urls: dict[str, str], directory: Path) -> None:
    """Promises 1 to 3 over three stateless servers."""
    with ExitStack() as stack:
        url = stack.enter_context(empty_database(database, database_urls, directory))
        made = cluster.Cluster(url, directory, stack)
        result = asyncio.run(cluster.run(made, seconds=10, every=2, callers=32, seed=5))
    assert result["kills"] >= 1 and result["acknowledged"] > 1000, result
    assert cluster.verdict(result) == [], result


def test_the_verdict_catches_what_a_cluster_may_do_wrong() -> None:
    good = {"lost": 0, "doubled": 0, "ghosts": 0, "success": 1.0, "slowest_seconds": 0.5, "errors": {}}
    assert cluster.verdict(good) == []
    for planted in ({"lost": 1}, {"doubled": 1}, {"ghosts": 1}, {"success": 0.99}, {"slowest_seconds": 9.0}):
        assert cluster.verdict(good | planted), planted


def test_a_bridge_is_killed_while_its_source_changes(directory: Path) -> None:
    """Promise 13: no gap, no duplicate, no reorder per key."""
    with ExitStack() as stack:
        try:
            result = bridge.run(directory, stack, kills=4, rotations=2, ddls=2, restarts=1, failovers=1, seed=3)
        except NotAvailable as reason:
            pytest.skip(str(reason))
    assert result["violations"] == [] and result["acknowledged"] > 1000, result
