"""Inputs that cannot prove anything: the audit says so, or refuses, and never passes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from notify import ids
from notify.client import create_tables
from notify.client.table import half_message, notify_inbox, notify_source
from notify.errors import InvalidRequest, StorageFailed, Unavailable
from notify.testing.process import ServerProcess
from spark.audit import Audit
from spark.databases import Database
from spark.log_input import LogInput
from spark.result import Inputs, Plan, Result
from storage.sql import schema
from storage.sql.rows import moment_of, text_of
from tests.audit.campaign import made_run
from tests.audit.made import Made
from tests.support.shop import make_engine

PLAN = Plan(max_transaction_seconds=5, deliver_seconds=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, str]:
    """A sound run of 2,000 transactions in several segments, and its database."""
    directory = tmp_path_factory.mktemp("run")
    url = f"sqlite:///{directory}/shop.db"
    return made_run(directory, url, 2000, segment_bytes=64 << 10), url


def copied(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.log, tmp_path / "copy"))


def audit(spark: Any, url: str, log: Path, tmp_path: Path, plan: Plan = PLAN) -> Result:
    with contextlib.closing(Database(url, "shop")) as database:
        return Audit(spark, plan, Inputs([database], [LogInput(log)]), tmp_path / "scratch").run()


def test_the_run_itself_passes(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    result = audit(spark, run[1], run[0].log, tmp_path)
    assert (result.verdict, result.exit_code, result.totals["committed"]) == ("PASS", 0, 2000)


def test_an_empty_database(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    engine = make_engine(url)
    create_tables(engine)
    engine.dispose()
    result = audit(spark, url, run[0].log, tmp_path)
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert any("no local row" in reason for reason in result.reasons)
    assert any("orders" in note for note in result.notes)  # whose database was not given


def test_an_empty_log(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such directory"):
        LogInput(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="no log is there"):
        LogInput(tmp_path)


def test_a_log_that_ends_too_early(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    """A stale copy: what the databases committed since is not lost, it cannot be judged."""
    log = copied(run[0], tmp_path)
    for path in (*sorted(log.glob("*.log"))[2:], *log.glob("*.ckpt"), *log.glob("*.idx")):
        path.unlink()
    # As if the databases had gone on for an hour behind the copy's last frame.
    found = LogInput(log)
    found.prepare(None, tmp_path / "s")
    late = f"sqlite:///{tmp_path}/late.db"
    shutil.copy(run[1].removeprefix("sqlite:///"), tmp_path / "late.db")
    there = {ids.to_text(run[0].id(n)) for n in range(2000)} - _names(found)
    assert 500 < len(there) < 2000
    engine = make_engine(late)
    with engine.begin() as connection:
        at = moment_of(found.facts[-1].last_us + 8_000_000)
        for name in there:
            own = half_message.c.transaction_id == name
            connection.execute(half_message.update().where(own).values(created_at=at))
        connection.execute(notify_inbox.delete())
    engine.dispose()
    while time.time() * 1e6 < found.facts[-1].last_us + 9_000_000:
        time.sleep(0.1)
    result = audit(spark, late, log, tmp_path)
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert any("stale" in reason for reason in result.reasons), result.reasons
    assert result.counts["LOST"] == 0 and result.counts["PENDING"] == len(there)


def _names(log: LogInput) -> set[str]:
    """The transactions that are in a queue."""
    rows = [pq.read_table(copy / "messages.parquet", columns=["id", "queued_us"]).to_pylist() for copy in log._copies]
    return {ids.to_text(row["id"]) for part in rows for row in part if row["queued_us"]}


@pytest.mark.parametrize("what", ["middle segment gone", "cut below its checkpoint", "no segment", "unreadable"])
def test_a_log_that_is_not_whole(spark: Any, run: tuple[Made, str], tmp_path: Path, what: str) -> None:
    log = copied(run[0], tmp_path)
    segments = sorted(log.glob("*.log"))
    assert len(segments) > 3
    if what == "middle segment gone":
        segments[1].unlink()
    elif what == "cut below its checkpoint":
        segments[-1].unlink()
        data = segments[-2].read_bytes()
        segments[-2].write_bytes(data[: len(data) // 2])
    elif what == "no segment":
        segments[1].write_bytes(b"garbage" * 100)
    else:
        segments[1].chmod(0)
        if segments[1].stat().st_uid == 0:
            segments[1].unlink()
            segments[1].mkdir()
    try:
        result = audit(spark, run[1], log, tmp_path)
    except (OSError, InvalidRequest):
        return  # said at once
    assert result.reasons and result.exit_code in (1, 2) and result.verdict != "PASS"


def test_a_database_of_another_schema(run: tuple[Made, str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    engine = make_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE notify_source DROP COLUMN rows_from")
    with pytest.raises(InvalidRequest, match=r"rows_from.*older schema"):
        Database(url)
    create_tables(engine)  # which mends it
    engine.dispose()
    Database(url).close()


def test_a_storage_of_a_newer_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/server.db"
    engine = sa.create_engine(url)
    schema.upgrade(engine, "main")
    Database(url).close()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {schema.VERSION_TABLE} SET version_num = 'ffff'")
    engine.dispose()
    with pytest.raises(StorageFailed, match="newer server"):
        Database(url)


def test_a_log_of_a_newer_version(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    log = copied(run[0], tmp_path)
    segment = sorted(log.glob("*.log"))[1]
    data = bytearray(segment.read_bytes())
    data[8:12] = (9).to_bytes(4, "little")
    segment.write_bytes(data)
    result = audit(spark, run[1], log, tmp_path)
    assert any("newer version" in reason for reason in result.reasons) and result.verdict != "PASS"


def test_purged_rows_are_no_ghosts(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    made, url = run
    copy = f"sqlite:///{tmp_path}/purged.db"
    shutil.copy(url.removeprefix("sqlite:///"), tmp_path / "purged.db")
    engine = make_engine(copy)
    half_us = made.at(1000)
    with engine.begin() as connection:
        gone = connection.execute(
            half_message.delete().where(half_message.c.created_at < sa.text(f"'{text_of(half_us)}'"))
        )
        assert gone.rowcount > 900
        connection.execute(notify_source.update().values(rows_from=half_us // 1000 + 1))
    engine.dispose()
    result = audit(spark, copy, made.log, tmp_path)
    assert result.verdict == "PASS" and 900 < result.totals["committed"] < 1001
    early = audit(spark, copy, made.log, tmp_path, replace(PLAN, from_us=made.first_us))
    assert early.exit_code == 2 and "purged" in early.reasons[0]


def test_a_database_that_goes_away_midway(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    from tests.support.databases import NotAvailable, PostgreSqlServer

    directory = Path(tempfile.mkdtemp(prefix="notify-pg-"))
    try:
        server = PostgreSqlServer(directory).create()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    try:
        engine = sa.create_engine(server.url)
        create_tables(engine)
        engine.dispose()
        database = Database(server.url, "shop")
        auditing = Audit(spark, PLAN, Inputs([database], [LogInput(run[0].log)]), tmp_path / "scratch")
        auditing._progress = lambda text: server.kill() if "databases" in text else None
        with pytest.raises(Exception, match=r"refused|terminat|closed|Connection"):
            auditing.run()
        with pytest.raises(Unavailable):
            Database(server.url, "shop")
        database.close()
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def command(*flags: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", "audit", *flags],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_what_is_missing(run: tuple[Made, str]) -> None:
    for flags, said in (
        (["run"], "--database"),
        (["run", "--database", run[1]], "--log"),
        (["run", "--database", "nonsense", "--log", "x"], "nonsense"),
        (["run", "--database", "postgresql://127.0.0.1:1/x", "--log", str(run[0].log)], "database x"),
        (["run", "--database", run[1], "--log", str(run[0].log), "--from", "yesterday"], "no instant"),
        (["explain", "nonsense", "--database", run[1], "--log", str(run[0].log)], "UUID"),
    ):
        code, _, error = command(*flags)
        assert code == 2 and said in error and "Traceback" not in error, (flags, error)


def test_the_command_writes_a_report(run: tuple[Made, str], server: ServerProcess, tmp_path: Path) -> None:
    made, url = run
    code, out, error = command(
        "run", "--json", "--database", f"shop={url}", "--log", str(made.log), "--report", str(tmp_path / "report"),
        "--max-transaction-seconds", "5", "--deliver-seconds", "5", "--effects", "SELECT message_id FROM notify_inbox",
        "--publish", "--url", server.url,
    )  # fmt: skip
    assert code == 0, error
    with urllib.request.urlopen(server.url + "/v1/admin/audits?max=1", timeout=10) as answer:
        (left,) = json.loads(answer.read())["audits"]
    assert (left["verdict"], left["has_report"]) == ("PASS", True)
    found = json.loads(out)
    assert found["verdict"] == "PASS" and found["counts"]["DUP_EFFECT"] == 0 and found["not_checked"] == {}
    report = tmp_path / "report"
    assert {p.name for p in report.iterdir()} == {
        "report.html", "report.json", "findings.parquet", "buckets.parquet", "segments",
    }  # fmt: skip
    assert json.loads((report / "report.json").read_text())["verdict"] == "PASS"
    code, out, _ = command(
        "explain", ids.to_text(made.id(7)), "--json", "--database", url, "--log", str(made.log), "--report", str(report)
    )
    events = [e["what"] for e in json.loads(out)["events"]]
    assert code == 0 and len(events) == 5 and "half of message 0" in events[0] and "acknowledged" in events[-1]
