"""Every class of finding, planted among sound transactions: all found, none misnamed, nothing else.

On MariaDB, whose JDBC has the traps; `make audit-faults` takes any database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark.audit import Audit
from spark.databases import Database
from spark.findings import FINDINGS
from spark.log_input import LogInput
from spark.result import Inputs, Plan
from tests.audit.campaign import campaign
from tests.audit.made import STEP_US
from tests.support.databases import empty_database

CLASSES = {f.name for f in FINDINGS} - {"PENDING"}


@pytest.fixture
def url(database_urls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    with empty_database("mariadb", database_urls, tmp_path) as found:
        yield found


def test_planted_faults_are_found_and_nothing_else(spark: Any, url: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    said: list[str] = []
    complaints = campaign(spark, url, tmp_path, 12_000, 8, said.append)
    assert complaints == []
    assert "clean run: PASS" in said[1]
    assert all(f"'{name}': {'8' if name != 'PENDING' else '0'}" in said[2] for name in CLASSES), said[2]


def test_a_window_has_what_belongs_to_it(spark: Any, database_urls: dict[str, str], tmp_path: Path) -> None:
    """Windows part the transactions: each is in one of them, and none looks lost at an edge."""
    from tests.audit.campaign import made_run

    tmp_path.chmod(0o755)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        made = made_run(tmp_path, url, 3000, segment_bytes=1 << 20)
        span_us = 3000 * STEP_US
        counts = []
        for n in range(3):
            plan = Plan(
                made.first_us + n * span_us // 3, made.first_us + (n + 1) * span_us // 3 + (n == 2) * 1_000_000,
                5, 5, closes_by_clock=True,
            )  # fmt: skip
            with contextlib.closing(Database(url)) as database:
                result = Audit(spark, plan, Inputs([database], [LogInput(made.log)]), tmp_path / "scratch").run()
            assert (result.verdict, result.found) == ("PASS", [])
            counts.append(result.totals["committed"])
        assert sum(counts) == 3000 and min(counts) > 900
