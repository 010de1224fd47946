"""Audits of a log that a server ships to a store: they say what an audit of the log itself says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from notify.errors import InvalidRequest, ObjectStoreFailed, Unavailable
from notify.object_store.store import Store
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.inputs import log_input
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.log_shipped import ShippedFiles
from notify.spark.inputs.log_source import NotifyLogSource
from notify.spark.report.files import plain
from notify.spark.result import Inputs, Plan, Result
from notify.storage.shipped import manifest
from tests.audit.audited import PLAN
from tests.audit.campaign import WITH_EFFECTS, differences, planted
from tests.audit.trade import Trade
from tests.support.databases import empty_database
from tests.support.shipping import ship_directory, shipped
from tools.bench.made_run import made_run


@pytest.fixture(scope="module")
def store(sound: Trade, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a store with the whole log of the sound trade."""
    return shipped(sound.log, tmp_path_factory.mktemp("shipped"))


@pytest.fixture
def own_store(store: str, tmp_path: Path) -> Path:
    """A copy of that store, to harm; the directory behind its URL."""
    return Path(shutil.copytree(store.removeprefix("file://"), tmp_path / "own"))


def prepared(place: Path | str, scratch: Path | str) -> LogInput:
    log = LogInput(place, "log")
    log.prepare(None, scratch)
    return log


def objects(store: Path) -> list[Path]:
    return sorted((store / "segments").glob("*.log"))


def audited(spark: Any, trade: Trade, place: Path | str, scratch: Path | str, plan: Plan = PLAN) -> Result:
    with trade.inputs() as inputs:
        return Audit(spark, plan, replace(inputs, logs=[LogInput(place, "log")]), scratch).run()


def told(result: Result) -> list[tuple[str, str]]:
    """The findings of a result, with their evidence."""
    return sorted((f["key"], json.dumps(f["evidence"], sort_keys=True)) for f in plain(result)["findings"])


# --- without Spark ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_shipped_log_is_read_as_the_log_itself(sound: Trade, store: str, tmp_path: Path) -> None:
    own = prepared(sound.log, tmp_path / "own")
    from_store = prepared(store, tmp_path / "copies")
    by_store = prepared(store, f"file://{tmp_path}/copied")
    assert not from_store.problems and not by_store.problems and len(from_store.facts) == len(own.facts) > 5
    assert from_store.facts == by_store.facts
    assert from_store.facts[:-1] == own.facts[:-1]
    assert (from_store.catalog, from_store.watermark_us) == (own.catalog, own.watermark_us)
    transaction = ids.from_text(sound.name(7))
    entries = own.entries_of(transaction)
    assert entries["messages"] and entries == from_store.entries_of(transaction) == by_store.entries_of(transaction)


def test_copies_in_a_store_serve_the_next_audit(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(store, f"file://{tmp_path}/copied")

    def refuse(*given: Any) -> None:
        raise AssertionError("a segment was read again")

    monkeypatch.setattr(log_input, "copied", refuse)
    again = prepared(store, f"file://{tmp_path}/copied")
    assert again.facts == first.facts and again.holes == []


def test_objects_that_are_missing_or_damaged_are_reasons(own_store: Path, tmp_path: Path) -> None:
    one, other = objects(own_store)[1:4:2]
    data = bytearray(one.read_bytes())
    data[200] ^= 1
    one.write_bytes(data)
    other.unlink()
    harmed = prepared(f"file://{own_store}", tmp_path / "copies")
    assert [p for p in harmed.problems if one.name in p and "differ from the manifest" in p], harmed.problems
    assert [p for p in harmed.problems if other.name in p and "not in the store" in p], harmed.problems
    assert len(harmed.problems) == 2 and len(list(harmed.unread(0))) == 2
    repaired = bytes(b ^ (n == 200) for n, b in enumerate(data))
    one.write_bytes(repaired)
    assert len(prepared(f"file://{own_store}", tmp_path / "copies").problems) == 1, "what is whole again is read again"


def cut_to(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


@pytest.mark.parametrize(
    "harm",
    [cut_to(0), cut_to(10), cut_to(40), cut_to(70), cut_to(5000), cut_to(-1), lambda data: bytes(len(data)),
     lambda data: data[: len(data) // 2] * 2, lambda data: data[::-1]],
)  # fmt: skip
def test_an_object_that_was_cut_or_overwritten_is_a_reason(
    own_store: Path, tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    path = objects(own_store)[1]
    path.write_bytes(harm(path.read_bytes()))
    log = prepared(f"file://{own_store}", tmp_path / "copies")
    (problem,) = log.problems
    assert path.name in problem and len(log.holes) == 1, problem


def test_objects_in_each_others_place_are_reasons_and_more_bytes_or_objects_are_none(
    own_store: Path, tmp_path: Path
) -> None:
    first, second, third, *_ = objects(own_store)
    third.write_bytes(third.read_bytes() * 2)  # what is listed of it is whole
    shutil.copy(third, third.with_name(third.name.replace("-000001", "-000007")))  # of a generation that nobody lists
    assert prepared(f"file://{own_store}", tmp_path / "copies").problems == []
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other), second.write_bytes(one)
    problems = prepared(f"file://{own_store}", tmp_path / "others").problems
    assert len(problems) == 2 and all("differ from the manifest" in problem for problem in problems), problems


def outdated(problems: list[str]) -> list[str]:
    return [problem for problem in problems if "is not the newest" in problem]


@pytest.mark.parametrize(("behind", "generation", "is_told"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_an_older_manifest_beside_newer_objects_is_a_reason(
    own_store: Path, tmp_path: Path, behind: int, generation: int, is_told: bool
) -> None:
    """An audit passed as if the log ended there. One segment of this generation is what a crash leaves."""
    store = Store(f"file://{own_store}")
    newest = manifest.load(store)
    assert newest is not None
    manifest.replace(store, replaced(newest, segments=newest.segments[:-behind]))
    if generation > 1:
        last = objects(own_store)[-1]
        last.rename(last.with_name(last.name.replace("-000001", f"-{generation:06d}")))
    problems = outdated(prepared(store.url, tmp_path / "copies").problems)
    assert len(problems) == is_told, problems
    assert all(f"which were not read: {behind}, of generations up to {generation}" in each for each in problems)
    files = ShippedFiles.of(store.url)
    manifest.replace(store, newest)  # as a server does that ships meanwhile
    assert outdated(files.segments()[1]) == []


def checkpoints(store: Path) -> list[Path]:
    return sorted((store / "segments").glob("*.ckpt"))


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_an_older_checkpoint_stands_in_for_one_that_is_gone_or_damaged(
    own_store: Path, tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    known = ShippedFiles.of(f"file://{own_store}")
    (whole,) = checkpoints(own_store)
    newest = own_store / "segments" / f"{1 << 40:020d}-000001.ckpt"
    newest.write_bytes(whole.read_bytes())
    listed = (*known.newest, (f"segments/{newest.name}", newest.stat().st_size))
    harm(newest)
    found = replace(known, newest=listed).checkpoint()
    assert found is not None and found == known.checkpoint()
    harm(whole)
    (problem,) = prepared(f"file://{own_store}", tmp_path / "copies").problems
    assert "no checkpoint in the store" in problem and "can be read" in problem


def test_a_log_whose_first_segments_and_checkpoints_were_dropped_proves_nothing(
    own_store: Path, tmp_path: Path
) -> None:
    """Nothing says which groups there were: what is undelivered would be no finding."""
    drop(own_store, 3)
    store = Store(f"file://{own_store}")
    known = manifest.load(store)
    assert known is not None
    bare = tuple(replaced(segment, checkpoint=None) for segment in known.segments)
    manifest.replace(store, replaced(known, segments=bare))
    (problem,) = prepared(f"file://{own_store}", tmp_path / "copies").problems
    assert "has no checkpoint" in problem


def test_copies_in_a_store_that_lost_one_say_what_to_do(store: str, tmp_path: Path) -> None:
    prepared(store, f"file://{tmp_path}/copied")
    tables = sorted(tmp_path.glob("copied/**/messages.parquet"))
    tables[0].unlink()
    tables[1].write_bytes(b"")
    log = prepared(store, f"file://{tmp_path}/copied")
    for segment in log.segments[:2]:
        with pytest.raises(ObjectStoreFailed, match=r"delete .*facts\.json"):
            log.copies.read("messages", segment)


def test_a_store_without_a_manifest_has_no_log(tmp_path: Path, own_store: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no manifest\.json; name the URL"):
        LogInput(f"file://{tmp_path}/nothing")
    (own_store / "manifest.json").write_text("{}")
    with pytest.raises(Exception, match="not a manifest that this version can read"):
        LogInput(f"file://{own_store}")


def rows_of(path: Path | str, **options: str) -> list[dict[str, Any]]:
    source = NotifyLogSource({"path": str(path), **options})
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("options", [{"table": "queue"}, {"table": "acks"}, {"table": "messages", "from": "log"}])
def test_the_source_reads_a_store(sound: Trade, store: str, options: dict[str, str]) -> None:
    rows = rows_of(sound.log, **options)
    assert sorted(rows, key=repr) == sorted(rows_of(store, **options), key=repr) and len(rows) > 50


def drop(store: Path, count: int, *, files: bool = True) -> int:
    """Drop the first segments from a store, as its server does with ship_keep; where it begins then."""
    known = manifest.load(Store(f"file://{store}"))
    assert known is not None
    left = known.segments[count:]
    manifest.replace(Store(f"file://{store}"), replaced(known, segments=left, dropped_to=left[0].base))
    for path in objects(store)[:count] if files else ():
        path.unlink()
    return left[0].base


def test_segments_that_the_server_dropped_are_no_loss(own_store: Path, tmp_path: Path) -> None:
    base = drop(own_store, 3)
    log = prepared(f"file://{own_store}", tmp_path / "copies")
    assert (log.problems, list(log.unread(0)), log.holes) == ([], [], []) and log.dropped_to == base
    assert log.first_us > 0, "an audit says from when on the log is whole"


def test_segments_that_are_dropped_while_they_are_read_are_told(own_store: Path, tmp_path: Path) -> None:
    log = LogInput(f"file://{own_store}", "log")
    source = NotifyLogSource({"path": f"file://{own_store}", "table": "acks"})
    reader = source.reader(source.schema())
    parts = reader.partitions()
    drop(own_store, 3)
    log.prepare(None, tmp_path / "copies")
    assert [problem for problem in log.problems if "because of their age (ship_keep): repeat" in problem], log.problems
    with pytest.raises(Unavailable, match=r"ship_keep"):
        list(reader.read(parts[0]))
    assert list(reader.read(parts[4]))


# --- with Spark ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_planted_faults_are_the_same_from_a_store(
    spark: Any, database_urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers copy the segments to a store, and read the copies from there."""
    tmp_path.chmod(0o755)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        made = made_run(tmp_path, url, 1000, segment_bytes=64 << 10)
        wanted = planted(made, url, tmp_path / "faulty", 2)
        place = shipped(tmp_path / "faulty", tmp_path / "shipped")

        def run(log: Path | str, scratch: Path | str) -> Result:
            with closing(Database(url, "shop")) as database:
                return Audit(spark, WITH_EFFECTS, Inputs([database], [LogInput(log, "log")]), scratch).run()

        own = run(tmp_path / "faulty", tmp_path / "scratch")
        monkeypatch.setattr(log_input, "COPIED_HERE_BYTES", 0)
        from_store = run(place, f"file://{tmp_path}/copies")
    assert differences(own, wanted) == [] == differences(from_store, wanted)
    assert told(from_store) == told(own)
    for name in ("verdict", "counts", "totals", "reasons", "notes", "not_checked"):
        assert getattr(from_store, name) == getattr(own, name), name


@pytest.mark.long
def test_messages_after_the_last_shipped_segment_are_pending(spark: Any, trade: Trade, tmp_path: Path) -> None:
    ship_directory(trade.log.parent, f"file://{tmp_path}/store")  # all but the last segment
    by_clock = replace(PLAN, closes_by_clock=True)  # as a watch does: an input that stalls must not hide what is lost
    result = audited(spark, trade, f"file://{tmp_path}/store", tmp_path / "copies", by_clock)
    assert result.counts["PENDING"] > 0 and not result.has_findings, result.counts


@pytest.mark.long
def test_messages_of_a_damaged_object_are_pending(spark: Any, sound: Trade, own_store: Path, tmp_path: Path) -> None:
    objects(own_store)[2].write_bytes(b"lost")
    result = audited(spark, sound, f"file://{own_store}", tmp_path / "copies")
    assert (result.verdict, result.exit_code) == ("INCONCLUSIVE", 2)
    assert [reason for reason in result.reasons if objects(own_store)[2].name in reason], result.reasons
    assert result.counts["PENDING"] > 0 and result.counts["LOST"] == 0


@pytest.mark.long
def test_a_range_before_what_the_server_dropped_is_inconclusive(
    spark: Any, sound: Trade, own_store: Path, tmp_path: Path
) -> None:
    drop(own_store, 3)
    place = f"file://{own_store}"
    whole = audited(spark, sound, place, tmp_path / "copies")
    assert (whole.verdict, whole.reasons) == ("PASS", [])
    (line,) = [line for line in whole.coverage if line.kind == "segments"]
    assert line.is_whole and "after those that retention dropped" in line.expected
    early = audited(spark, sound, place, tmp_path / "copies", replace(PLAN, from_us=sound.at(0)))
    assert early.verdict == "INCONCLUSIVE" and not early.has_findings
    assert [reason for reason in early.reasons if "older segments deleted" in reason], early.reasons
