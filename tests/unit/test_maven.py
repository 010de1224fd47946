"""Jars that several processes need are fetched once, and whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from notify.errors import Unavailable
from notify.runtime.maven import fetched

# A Maven that takes its time, says that it ran, and writes two jars; the second one only if it is to succeed.
MAVEN = """#!/bin/sh
echo ran >> "{calls}"
for word in "$@"; do case "$word" in -DoutputDirectory=*) out="${{word#*=}}";; esac; done
mkdir -p "$out"
echo one > "$out/one.jar"
sleep 0.3
[ -e "{fails}" ] && exit 1
echo two > "$out/two.jar"
"""


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory where `calls` has a line for each run; with a file `fails` in it, Maven fails."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("mvn", MAVEN.format(calls=tmp_path / "calls", fails=tmp_path / "fails")), ("java", "")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_of_several_that_need_the_jars_one_fetches(maven: Path) -> None:
    found: list[list[str]] = []

    def fetch() -> None:
        directory = fetched(maven / "pom.xml", maven / "lib" / "jars", "*.jar", "Kafka")
        found.append(sorted(path.name for path in directory.iterdir()))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["one.jar", "two.jar"]] * 4
    assert (maven / "calls").read_text() == "ran\n"


def test_a_part_of_the_jars_does_not_count_as_fetched(maven: Path) -> None:
    (maven / "fails").touch()
    directory = maven / "lib"
    directory.mkdir()
    (directory / "own.txt").write_text("of the owner")
    with pytest.raises(Unavailable, match="no Kafka: Maven could not fetch"):
        fetched(maven / "pom.xml", directory, "*.jar", "Kafka")
    assert [path.name for path in directory.iterdir()] == ["own.txt"]
    (maven / "fails").unlink()
    fetched(maven / "pom.xml", directory, "*.jar", "Kafka")
    assert sorted(path.name for path in directory.iterdir()) == ["one.jar", "own.txt", "two.jar"]
