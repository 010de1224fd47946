"""Every class of finding, planted among sound transactions: all found, none misnamed, nothing else.

They run on MySQL, and in `make test-long` on MariaDB: MariaDB's JDBC driver, the most difficult one, reads both.
`make audit-faults` takes any database.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notify.spark.judge.findings import FINDINGS
from notify.spark.result import LATENCIES
from tests.audit.audited import PLAN, audited
from tests.audit.campaign import faulty_run, sound_run
from tests.support.databases import empty_database
from tools.bench.made_run import Made, made_run

CLASSES = {f.name for f in FINDINGS} - {"PENDING", "FORGOTTEN", "LEFT_OUT", "WITHDRAWN"}
"""Those that a fault is planted of. Only a log that was restored has forgotten what came before; LEFT_OUT is planted by
each of its causes; WITHDRAWN is no fault, and test_judge.py has its cases."""
EACH = 5
"""An odd number: no class has one fault fewer where halves of it are planted in two ways."""
CAUSES = 10


@pytest.fixture(params=["mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, database_urls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    with empty_database(request.param, database_urls, tmp_path) as database:
        yield database


@pytest.fixture
def made(url: str, tmp_path: Path) -> Made:
    tmp_path.chmod(0o755)
    return made_run(tmp_path, url, 3000)


def test_planted_faults_are_found_and_nothing_else(spark: Any, url: str, made: Made, tmp_path: Path) -> None:
    said: list[str] = []
    assert faulty_run(spark, url, made, tmp_path, EACH, said.append) == []
    assert f"'LEFT_OUT': {CAUSES}" in said[0], said[0]
    assert all(f"'{name}': {EACH}" in said[0] for name in CLASSES) and "'PENDING': 0" in said[0], said[0]
    compared = {line.split()[0]: line.split()[2:] for line in said[1:]}
    assert compared.keys() == CLASSES | {"LEFT_OUT"}
    assert all(line == [f"{EACH},", "found", f"{EACH},", "others", "0"] for n, line in compared.items() if n in CLASSES)


@pytest.mark.long  # test_inputs.py has a command that audits a sound run
def test_a_run_without_faults_has_no_finding(spark: Any, url: str, made: Made, tmp_path: Path) -> None:
    assert sound_run(spark, url, made, tmp_path, print) == []


@pytest.mark.long
def test_a_window_has_what_belongs_to_it(spark: Any, database_urls: dict[str, str], tmp_path: Path) -> None:
    """Windows part the transactions: each is in one of them, and none looks lost at an edge."""
    tmp_path.chmod(0o755)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        made = made_run(tmp_path, url, 2000, segment_bytes=1 << 20)
        edges = [made.at(0), made.at(1000), made.at(2000) + 1_000_000]
        committed = []
        for start, end in zip(edges, edges[1:], strict=False):
            plan = replace(PLAN, from_us=start, to_us=end, closes_by_clock=True)
            result = audited(spark, url, made.log, tmp_path / "scratch", plan)
            assert (result.verdict, result.found) == ("PASS", [])
            committed.append(result.totals["committed"])
            measured = {kind: sum(count for *_, count in result.latencies[kind]) for kind in LATENCIES}
            assert measured == dict.fromkeys(LATENCIES, committed[-1])
        assert sum(committed) == 2000 and min(committed) > 900
