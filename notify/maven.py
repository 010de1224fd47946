"""Fetches jars with Maven, once: those of Java programs that no Python package brings."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from notify.errors import Unavailable

FETCH_SECONDS = 300


def fetched(pom: Path, directory: Path, pattern: str, product: str) -> Path:
    """The directory with the dependencies of a POM, which are fetched if no file in it matches `pattern`.

    Raises Unavailable with the reason; the text names the missing `product`.
    """
    if any(directory.glob(pattern)):
        return directory
    if shutil.which("java") is None or shutil.which("mvn") is None:
        raise Unavailable(f"no {product}: Java 17 and Maven are needed to fetch it")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={directory}"],
            capture_output=True, text=True, timeout=FETCH_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"no {product}: Maven did not fetch its jars within {FETCH_SECONDS} s") from None
    if done.returncode:
        raise Unavailable(f"no {product}: Maven could not fetch its jars: {done.stdout[-500:]}")
    return directory
