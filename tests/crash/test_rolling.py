"""SQL servers of both versions beside each other under load, upgraded and taken back one by one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.crash import rolling
from tests.support.databases import empty_database
from tests.support.versions import earlier_version

__all__ = ["earlier_version"]

pytestmark = pytest.mark.crash


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
