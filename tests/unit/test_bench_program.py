"""`python -m tools.bench NAME`: its names, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import tools.bench
from tools.bench.__main__ import PROGRAMS, main

ROOM = Path(tools.bench.__file__).parent


def test_each_module_with_options_of_its_own_has_a_name() -> None:
    found = {
        ".".join(path.relative_to(ROOM).with_suffix("").parts).removesuffix(".__main__")
        for path in ROOM.rglob("*.py")
        if path != ROOM / "__main__.py" and "ArgumentParser(" in path.read_text()
    }
    assert found == set(PROGRAMS)


def test_each_target_of_the_makefile_names_a_bench() -> None:
    named = re.findall(r"-m tools\.bench ([\w.]+)", (ROOM.parents[1] / "Makefile").read_text())
    assert set(named) == set(PROGRAMS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bridge", "--dsn", "nonsense"), "not a database URL"),
        (("bridge", "--dsn", "sqlite:///x.db"), "SQLite has one writer, and no log"),
        (("delivery", "--client", "wires"), "--client must be one of wire, plain, threads, coroutines"),
        (("delivery", "--mode", "broadcast"), "--mode must be shared, ordered, failover or exclusive"),
    ],
)
def test_a_wrong_argument_is_refused(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.bench", *words])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in printed and "Traceback" not in printed
