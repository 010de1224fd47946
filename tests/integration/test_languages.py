"""The examples in other languages: half, commit, check and consume without the SDK, each with its own toolchain."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from notify.errors import Unavailable
from notify.runtime.maven import fetched
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import admin

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "languages"
ID_CHARACTERS = 36
"""Drafts of a file have longer names."""
STATES = {"COMMIT": "COMMITTED", "ROLLBACK": "ROLLED_BACK"}
JARS = ROOT / ".venv" / "gson"


def node(scratch: Path) -> list[str]:
    return ["node", str(EXAMPLES / "shop.mjs")]


def go(scratch: Path) -> list[str]:
    """It compiles Go's library as well, which takes 40 s of CPU on a new machine."""
    subprocess.run(
        ["go", "build", "-o", str(scratch / "shop"), str(EXAMPLES / "shop.go")],
        check=True, timeout=5 * PATIENCE_SECONDS,
        env=os.environ | {"GOCACHE": str(scratch / "cache"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"},
    )  # fmt: skip
    return [str(scratch / "shop")]


def java(scratch: Path) -> list[str]:
    try:
        jars = fetched(EXAMPLES / "pom.xml", JARS, "gson-*.jar", "Gson")
    except Unavailable as reason:
        pytest.skip(str(reason))
    return ["java", "-cp", f"{jars}/*", str(EXAMPLES / "Shop.java")]


@pytest.mark.long
@pytest.mark.parametrize(
    "program", [node, pytest.param(java, marks=pytest.mark.long), pytest.param(go, marks=pytest.mark.long)]
)
def test_half_commit_check_consume(program: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """The outcome of one order is told; of the others one is committed and one rolled back, by answers to checks."""
    name = program.__name__
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    words = program(tmp_path)
    with InMemoryServer() as server:
        done = subprocess.run(
            [*words, server.url, str(tmp_path / "data")],
            capture_output=True, text=True, timeout=3 * PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")) == ["", "points for book", "points for lamp"]
        transactions = sorted((tmp_path / "data" / "transactions").iterdir())
        decided = {row.name: row.read_text() for row in transactions if len(row.name) == ID_CHARACTERS}
        states = {row: admin(server.url, "GET", f"transactions/{row}")["state"] for row in decided}
    assert sorted(decided.values()) == ["COMMIT", "COMMIT", "ROLLBACK"]
    assert states == {row: STATES[outcome] for row, outcome in decided.items()}
