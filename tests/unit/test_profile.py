"""`make profile`: its table, and the sampler in a process that knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from notify.bench.profile.__main__ import SAMPLER, Profile, table

BUSY = """
import os, pathlib, sys, time
def spin(file, until):
    while not file.exists() and time.monotonic() < until:
        pass
spin(pathlib.Path(sys.argv[1]), time.monotonic() + 60)
"""


def test_a_table_has_both_sides_and_sums_what_is_small() -> None:
    before = Profile("1" * 40, 1000.0, {"server": {"a f": 6.0, "b g": 3.96, "c tiny": 0.04}})
    after = Profile("2" * 40, 2000.0, {"server": {"a f": 2.0, "d new": 3.0}})
    assert table("server", before, after).splitlines() == [
        "| server, µs of CPU a transaction | 1111111 | 2222222 |",
        "|---|---|---|",
        "| all | 10.00 | 5.00 |",
        "| `a f` | 6.00 | 2.00 |",
        "| `b g` | 3.96 |  |",
        "| `d new` |  | 3.00 |",
        "| functions below 1% | 0.04 |  |",
    ]


@pytest.mark.parametrize(("role", "is_sampled"), [("notify.bench.load", True), ("notify.bench.consume", False)])
def test_a_process_is_sampled_by_its_command(tmp_path: Path, role: str, is_sampled: bool) -> None:
    file = tmp_path / "client"
    if not is_sampled:
        file.write_text("{}")
    environment = os.environ | {
        "PYTHONPATH": str(SAMPLER), "PROFILED_TO": str(tmp_path), "PROFILED_SECONDS": "0.05 0.5",
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", BUSY, file, role], env=environment, check=True, timeout=120)
    counts = json.loads(file.read_text())
    assert any(place.endswith(":spin") for place in counts) == is_sampled
