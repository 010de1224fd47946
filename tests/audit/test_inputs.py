"""Inputs that prove nothing: the audit is INCONCLUSIVE or refuses, and never passes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from notify.cli import audit as command
from notify.client import create_tables
from notify.client.tables.definitions import WITHOUT_ROWS_MS, half_message, notify_inbox, notify_source
from notify.errors import InvalidRequest, StorageFailed, Unavailable
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_files import LocalFiles
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs
from notify.spark.tables.source import NotifyTable
from notify.storage.log.checkpoint import checkpoint_name
from notify.storage.log.format import SEGMENT_HEADER_SIZE
from notify.storage.sql import schema
from notify.storage.sql.rows import moment_of, text_of
from notify.testing.process import ServerProcess
from tests.audit.audited import PLAN, audited
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.http import admin
from tests.support.proxy import Proxy
from tests.support.shipping import sealed_copy
from tests.support.shop import make_engine
from tools.bench.made_run import SOURCE, Made, made_run

COUNT = 600


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, str]:
    """A sound run in several segments, and its database."""
    directory = tmp_path_factory.mktemp("run")
    url = f"sqlite:///{directory}/shop.db"
    return made_run(directory, url, COUNT, segment_bytes=48 << 10, step_us=1000), url


def copied(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.log, tmp_path / "copy"))


def copied_database(url: str, tmp_path: Path) -> str:
    shutil.copy(url.removeprefix("sqlite:///"), tmp_path / "copy.db")
    return f"sqlite:///{tmp_path}/copy.db"


@pytest.mark.long
def test_a_database_without_rows_makes_an_audit_inconclusive(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    engine = make_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(id=SOURCE))
    engine.dispose()
    result = audited(spark, url, run[0].log, tmp_path / "scratch")
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert any("no local row" in reason for reason in result.reasons)
    assert any("orders" in note for note in result.notes)  # whose database was not given


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such directory"):
        LogInput(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="has no log"):
        LogInput(tmp_path)


@pytest.mark.long
def test_a_log_that_ends_too_early(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    """A stale copy: what the databases committed since is not lost, it cannot be judged."""
    log = copied(run[0], tmp_path)
    for path in (*sorted(log.glob("*.log"))[2:], *log.glob("*.ckpt"), *log.glob("*.idx")):
        path.unlink()
    stale = LogInput(log)
    stale.prepare(None, tmp_path / "scratch")
    missing = {ids.to_text(run[0].id(n)) for n in range(COUNT)} - queued(tmp_path / "scratch")
    assert 0 < len(missing) < COUNT
    # The databases committed after the copy's last frame, for longer than the longest transaction.
    plan = replace(PLAN, max_transaction_seconds=0.1)
    at_us = stale.watermark_us + 200_000
    eventually(lambda: time.time_ns() // 1000 > at_us, "the time of what the copy lacks to be past")
    url = copied_database(run[1], tmp_path)
    engine = make_engine(url)
    with engine.begin() as connection:
        of_missing = half_message.c.transaction_id.in_(sorted(missing))
        connection.execute(half_message.update().where(of_missing).values(created_at=moment_of(at_us)))
        connection.execute(notify_inbox.delete())
    engine.dispose()
    result = audited(spark, url, log, tmp_path / "scratch", plan)
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert any("stale" in reason for reason in result.reasons), result.reasons
    assert result.counts["LOST"] == 0 and result.counts["PENDING"] == len(missing)


def queued(scratch: Path) -> set[str]:
    """The transactions that are in a queue, by the copies of a log's segments."""
    parts = [pq.read_table(file, columns=["id", "queued_us"]) for file in scratch.rglob("messages.parquet")]
    return {ids.to_text(row["id"]) for part in parts for row in part.to_pylist() if row["queued_us"]}


# --- logs that are not whole ----------------------------------------------------------------------------------------


def without_its_middle(segments: list[Path]) -> None:
    segments[1].unlink()


def cut_below_its_checkpoint(segments: list[Path]) -> None:
    segments[-1].unlink()
    data = segments[-2].read_bytes()
    segments[-2].write_bytes(data[: len(data) // 2])


def with_what_is_no_segment(segments: list[Path]) -> None:
    segments[1].write_bytes(b"garbage" * 100)


def of_a_newer_version(segments: list[Path]) -> None:
    data = bytearray(segments[1].read_bytes())
    data[8:12] = (9).to_bytes(4, "little")
    segments[1].write_bytes(data)


def unreadable(segments: list[Path]) -> None:
    """Root may read whatever it likes, but no directory as a file."""
    segments[1].unlink()
    segments[1].mkdir()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (without_its_middle, "are missing"),
        (cut_below_its_checkpoint, "it was cut"),
        (with_what_is_no_segment, "not a segment"),
        (of_a_newer_version, "newer version"),
        (unreadable, "directory"),
    ],
)
def test_a_log_that_is_not_whole_says_so(
    run: tuple[Made, str], tmp_path: Path, harm: Callable[[list[Path]], None], said: str
) -> None:
    log = copied(run[0], tmp_path)
    segments = sorted(log.glob("*.log"))
    assert len(segments) > 3
    harm(segments)
    try:
        harmed = LogInput(log)
        harmed.prepare(None, tmp_path / "scratch")
    except OSError as error:
        problems = [str(error)]
    else:
        problems = [*harmed.problems, *harmed.unread(0)]
    assert any(said in problem for problem in problems), problems


def test_a_log_whose_last_segment_is_empty_is_whole(run: tuple[Made, str], tmp_path: Path) -> None:
    """A server that ships begins one each minute. If it was stopped before the next message, its log was called cut."""
    data_dir = sealed_copy(copied(run[0], tmp_path), tmp_path / "sealed")
    base = LocalFiles(data_dir / "log").segments()[0][-1].base
    assert (data_dir / "log" / checkpoint_name(base + SEGMENT_HEADER_SIZE)).exists()
    log = LogInput(data_dir)
    log.prepare(None, tmp_path / "scratch")
    assert [*log.problems, *log.unread(0)] == []


@pytest.mark.long
def test_a_log_that_is_not_whole_proves_nothing(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    """Whatever is wrong with it, see above: an audit repeats it, and does not pass."""
    log = copied(run[0], tmp_path)
    with_what_is_no_segment(sorted(log.glob("*.log")))
    result = audited(spark, run[1], log, tmp_path / "scratch")
    assert any("not a segment" in reason for reason in result.reasons)
    assert result.exit_code in (1, 2) and result.verdict != "PASS"


# --- databases ------------------------------------------------------------------------------------------------------


def test_a_database_of_another_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    engine = make_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE notify_source DROP COLUMN rows_from")
    with pytest.raises(InvalidRequest, match=r"rows_from.*older version"):
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


def purged(made: Made, url: str) -> None:
    """Purge the older half of the local rows."""
    engine = make_engine(url)
    half_us = made.at(COUNT // 2)
    with engine.begin() as connection:
        early = half_message.c.created_at < sa.text(f"'{text_of(half_us)}'")
        assert connection.execute(half_message.delete().where(early)).rowcount == COUNT // 2
        # The purge's mark is exact to a millisecond, in which the first remaining row lies.
        connection.execute(notify_source.update().values(rows_from=half_us // 1000 + 1))
    engine.dispose()


@pytest.mark.long
def test_purged_rows_are_no_ghosts(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    url = copied_database(run[1], tmp_path)
    purged(run[0], url)
    result = audited(spark, url, run[0].log, tmp_path / "scratch")
    assert (result.verdict, result.totals["committed"]) == ("PASS", COUNT // 2 - 1)


@pytest.mark.long
def test_producers_that_write_no_rows_leave_an_audit_nothing_to_compare(
    spark: Any, run: tuple[Made, str], tmp_path: Path
) -> None:
    """Their messages are no ghosts; what the rows of others show is still found."""
    url = copied_database(run[1], tmp_path)
    engine = make_engine(url)
    lacking = run[0].at(COUNT // 2)
    with engine.begin() as connection:
        early = half_message.c.created_at < sa.text(f"'{text_of(lacking)}'")
        assert connection.execute(half_message.delete().where(early)).rowcount == COUNT // 2
        connection.execute(notify_source.update().values(rows_from=WITHOUT_ROWS_MS))
    engine.dispose()
    result = audited(spark, url, run[0].log, tmp_path / "scratch")
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert "rows=False" in result.reasons[0] and not result.counts.get("GHOST")
    assert result.totals["committed"] == COUNT // 2


@pytest.mark.long
def test_a_range_that_begins_before_a_purge(spark: Any, run: tuple[Made, str], tmp_path: Path) -> None:
    url = copied_database(run[1], tmp_path)
    purged(run[0], url)
    result = audited(spark, url, run[0].log, tmp_path / "scratch", replace(PLAN, from_us=run[0].first_us))
    assert result.exit_code == 2 and "purged" in result.reasons[0]


@pytest.mark.long
def test_a_database_that_goes_away_midway(
    spark: Any, run: tuple[Made, str], database_urls: dict[str, str], tmp_path: Path
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as direct:
        address = sa.make_url(direct)
        with Proxy(address.host or "", address.port or 5432) as proxy:
            url = address.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
            engine = sa.create_engine(direct)
            create_tables(engine)
            with engine.begin() as connection:
                connection.execute(notify_source.update().values(id=SOURCE))
            engine.dispose()

            def cut(doing: str) -> None:
                if "databases" in doing:
                    proxy.close()

            with contextlib.closing(Database(url, "shop")) as database:
                inputs = Inputs([database], [LogInput(run[0].log)])
                with pytest.raises(Exception, match=r"refused|terminat|closed|Connection"):
                    Audit(spark, PLAN, inputs, tmp_path / "scratch", cut).run()
            with pytest.raises(Unavailable):
                Database(url, "shop")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_missing(run: tuple[Made, str]) -> None:
    log = str(run[0].log)
    for flags, said in (
        (["run"], "--database"),
        (["run", "--database", run[1]], "--log"),
        (["run", "--database", "nonsense", "--log", "x"], "not a database URL"),
        (["run", "--database", "postgresql://127.0.0.1:1/x", "--log", log], "database x"),
        (["run", "--database", run[1], "--log", log, "--from", "yesterday"], "is not an instant"),
        (["explain", "nonsense", "--database", run[1], "--log", log], "UUID"),
    ):
        code, answer = cli("audit", *flags)
        assert code == 2 and said in answer["text"], (flags, answer)


def test_a_failure_of_the_audit_does_not_look_like_a_finding(
    run: tuple[Made, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 says that there are findings: never that the audit broke."""
    monkeypatch.setattr(command, "session", lambda *_, **__: contextlib.nullcontext(None))
    flags = flags_of(run, tmp_path / "report")
    for error, said in (
        (KeyError("a fault"), "a fault"),
        (KeyboardInterrupt(), "interrupted"),
        (OSError("a disk"), ""),
    ):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(Audit, "run", fail)
        code, answer = cli("audit", "run", *flags)
        assert code == 2 and said in answer.get("failed", ""), answer


def flags_of(run: tuple[Made, str], report: Path) -> list[str]:
    """The flags of `notify audit run` for a made run."""
    return [
        "--json", "--database", f"shop={run[1]}", "--log", str(run[0].log), "--report", str(report),
        "--max-transaction-seconds", "5", "--deliver-seconds", "5", "--effects", "SELECT message_id FROM notify_inbox",
    ]  # fmt: skip


def rows_of(url: str, table: str) -> list[dict[str, Any]]:
    """The rows of a table, as the data source gives them to Spark."""
    source = NotifyTable({"path": url, "table": table})
    reader = source.reader(source.schema())
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return list(pa.Table.from_batches(batches).to_pylist())


def test_the_command_writes_a_report(
    spark: Any, run: tuple[Made, str], server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "session", lambda *_, **__: contextlib.nullcontext(spark))
    report = tmp_path / "report"
    results = f"file://{tmp_path}/results"
    flags = [*flags_of(run, report), "--publish", "--url", server.url, "--results", results]
    code, answer = cli("audit", "run", *flags)
    assert code == 0, answer
    assert (answer["verdict"], answer["totals"]["committed"], answer["findings"]) == ("PASS", COUNT, [])
    assert answer["counts"]["DUP_EFFECT"] == 0 and answer["not_checked"] == {}
    (published,) = admin(server.url, "GET", "audits?max=1")["audits"]
    assert (published["verdict"], published["has_report"]) == ("PASS", True)
    assert {p.name for p in report.iterdir()} == {
        "report.html", "report.json", "findings.parquet", "buckets.parquet", "segments", "proved.json",
    }  # fmt: skip
    assert json.loads((report / "report.json").read_text())["verdict"] == "PASS"
    assert sum(row["committed"] for row in rows_of(results, "buckets")) == COUNT
    states = {(row["kind"], row["name"]): row["read"] for row in rows_of(results, "state")}
    assert states["audit", "newest"] == "PASS" and "source" in {kind for kind, _ in states}
    wanted = ids.to_text(run[0].id(7))
    code, answer = cli(
        "audit", "explain", wanted, "--json", "--database", run[1], "--log", str(run[0].log), "--report", str(report)
    )
    events = [e["what"] for e in answer["events"]]
    assert code == 0 and len(events) == 5 and "half of message 0" in events[0] and "acknowledged" in events[-1]


@pytest.mark.long
def test_spark_reads_the_results(
    spark: Any, run: tuple[Made, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test above reads them without Spark, whose workers of Python take four seconds of CPU to start."""
    monkeypatch.setattr(command, "session", lambda *_, **__: contextlib.nullcontext(spark))
    results = f"file://{tmp_path}/results"
    code, answer = cli("audit", "run", *flags_of(run, tmp_path / "report"), "--results", results)
    assert code == 0, answer
    spark.dataSource.register(NotifyTable)
    for table in ("buckets", "state"):
        read = spark.read.format("notify_table").load(results, table=table).collect()
        assert len(read) == len(rows_of(results, table)) > 0


@pytest.mark.long
def test_the_command_starts_spark_and_stops_it(run: tuple[Made, str], tmp_path: Path) -> None:
    """A process of its own, with a JVM of its own: what the test above lends it."""
    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", "audit", "run", *flags_of(run, tmp_path / "report")],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "PASS"
