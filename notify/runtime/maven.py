"""Fetches the jars of Java programs with Maven, once, if no Python package contains them."""

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
"""The longest wait for other processes that are fetching."""
_LOOK_SECONDS = 0.2
_LOCK = ".maven.lock"


def fetched(pom: Path, directory: Path, pattern: str, product: str) -> Path:
    """The directory with the dependencies of a POM, which are fetched if no file in it matches `pattern`.

    If several processes need them, one of them fetches. Raises Unavailable with the reason, for the missing `product`.
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
    """Put all jars into the directory, or none: an incomplete directory would count as fetched."""
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
        if directory.exists():  # keep the user's other files
            for existing in directory.iterdir():
                if not (jars / existing.name).exists():
                    shutil.move(existing, jars / existing.name)
            shutil.rmtree(directory)
        os.rename(jars, directory)


@contextmanager
def _alone(lock: Path, product: str) -> Iterator[None]:
    """Hold the lock, because Maven's local repository allows only one process to download at a time."""
    deadline = time.monotonic() + WAIT_SECONDS
    with lock.open("w") as lock_file:
        while True:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"no {product}: another process has fetched for {WAIT_SECONDS} s") from None
                time.sleep(_LOOK_SECONDS)
        yield
