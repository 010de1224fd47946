"""Fetches jars with Maven, once: those of Java programs that no Python package brings."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from notify.errors import Unavailable

FETCH_SECONDS = 300
WAIT_SECONDS = 3 * FETCH_SECONDS
"""The longest wait for other processes that fetch."""
_LOOK_SECONDS = 0.2
_LOCK = ".maven.lock"


def fetched(pom: Path, directory: Path, pattern: str, product: str) -> Path:
    """The directory with the dependencies of a POM, which are fetched if no file in it matches `pattern`.

    Of several processes that need them one fetches. Raises Unavailable with the reason; the text names the missing
    `product`.
    """
    if any(directory.glob(pattern)):
        return directory
    if shutil.which("java") is None or shutil.which("mvn") is None:
        raise Unavailable(f"no {product}: Java 17 and Maven are needed to fetch it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _alone(directory.parent / _LOCK, product):
        if not any(directory.glob(pattern)):
            _fetch(pom, directory, product)
    return directory


def _fetch(pom: Path, directory: Path, product: str) -> None:
    """Have all jars in the directory, or none: a part of them would count as fetched."""
    with tempfile.TemporaryDirectory(prefix=".maven-", dir=directory.parent) as fresh:
        jars = Path(fresh) / "jars"
        try:
            done = subprocess.run(
                ["mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={jars}"],
                capture_output=True, text=True, timeout=FETCH_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Unavailable(f"no {product}: Maven did not fetch its jars within {FETCH_SECONDS} s") from None
        if done.returncode:
            raise Unavailable(f"no {product}: Maven could not fetch its jars: {done.stdout[-500:]}")
        if directory.exists():  # other files of its owner stay
            for known in directory.iterdir():
                if not (jars / known.name).exists():
                    shutil.move(known, jars / known.name)
            shutil.rmtree(directory)
        os.rename(jars, directory)


@contextmanager
def _alone(lock: Path, product: str) -> Iterator[None]:
    """Maven's own repository, too, bears one process that downloads."""
    deadline = time.monotonic() + WAIT_SECONDS
    with lock.open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"no {product}: another process has fetched for {WAIT_SECONDS} s") from None
                time.sleep(_LOOK_SECONDS)  # the pause between two looks
        yield
