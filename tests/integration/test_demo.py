"""`notify demo` as a user runs it, and its verdict where it cannot continue."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from notify.cli.demo import show_summary
from notify.cli.demo_shop.end import POINTS
from notify.cli.demo_shop.run import Demo
from tests.support.commands import cli

DEMO_SECONDS = 900
"""Seconds; the demo's own bounds end it before."""


@pytest.mark.long
@pytest.mark.timeout(DEMO_SECONDS + 60)
@pytest.mark.parametrize(
    "database",
    [pytest.param("mariadb", marks=pytest.mark.long), pytest.param("postgresql", marks=pytest.mark.long), "sqlite"],
)
def test_the_demo_proves_itself_on_each_database(database: str, engine_url: str) -> None:
    given = [] if database == "sqlite" else ["--dsn", engine_url]
    words = [sys.executable, "-m", "notify.cli.main", "demo", "--seconds", "5", "--json", *given]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEMO_SECONDS)
    proof = json.loads(done.stdout)
    assert done.returncode == 0, proof
    assert proof["ok"] and proof["reasons"] == []
    assert proof["committed"] == proof["exactly_once"] >= 100
    assert proof["killed"].keys() == {"producer", "consumer", "server"} and all(proof["killed"].values())
    assert proof["killed_at"].keys() == set(POINTS.values()) and all(proof["killed_at"].values())
    assert proof["resolved_by_check"] == sum(proof["in_doubt"].values()) >= 2
    for point, state, answer in (
        ("between COMMIT and outcome", "COMMITTED", "COMMIT"),
        ("between half and COMMIT", "ROLLED_BACK", "ROLLBACK"),
    ):
        lost = [transaction for transaction in proof["lost"] if transaction["point"] == point]
        assert lost and all(transaction["state"] == state for transaction in lost), proof["lost"]
        assert any(
            [check["what"] for check in transaction["checks"]][-2:] == ["asked", answer] for transaction in lost
        ), lost


class Nowhere:
    """A topology with an invalid address: the shop's processes end as soon as they have started."""

    producer_url = consumer_url = "nowhere"

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        pass

    def parts(self) -> list[str]:
        return ["server"]

    def ended(self) -> dict[str, int]:
        return {}

    def last_words(self) -> dict[str, list[str]]:
        return {"server": ["here I am"]}

    def undecided(self) -> list[dict[str, Any]]:
        return []


@pytest.mark.long
def test_a_process_that_dies_at_its_start_is_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    proof = Demo(None, topology=Nowhere).run()  # type: ignore[arg-type]
    assert not proof.ok
    output = io.StringIO()
    show_summary(Console(file=output, width=200), proof)
    *before, verdict = output.getvalue().splitlines()
    last_words = {name: lines[-1] for name, lines in proof.stderr.items() if lines}
    assert last_words.pop("server") == "here I am"
    names = [name for name in last_words if verdict.startswith(f"VERDICT: FAIL {name} (life 1) ended by itself")]
    assert len(names) == 1 and verdict.endswith(f"with exit code 1: {last_words[names[0]]}"), (verdict, last_words)
    assert f"  {names[0]}: {last_words[names[0]]}" in before and "  server: here I am" in before
    assert (Path(proof.directory) / "shop.db").exists(), "a failed run keeps its files"


def test_a_topology_that_does_not_start_is_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("NOTIFY_SEGMENT_BYTES", "nonsense")
    code, proof = cli("demo", "--seconds", "5", "--json")
    assert code == 1 and not proof["ok"]
    (reason,) = proof["reasons"]
    assert reason.startswith("the server did not become ready:") and "\n" not in reason, reason


def test_a_database_that_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    code, answer = cli("demo", "--dsn", f"sqlite:///{tmp_path}/nowhere/shop.db")
    assert code == 2 and answer["text"].startswith("notify: the demo's database cannot be used: ")
    assert len(answer["text"].splitlines()) == 1
