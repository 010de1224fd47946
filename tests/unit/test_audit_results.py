"""Results of audits as tables: each audit replaces what it judged, by key, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from notify.errors import InvalidRequest, ObjectStoreFailed
from notify.object_store.store import Store
from notify.spark.judge.measures import TOTALS
from notify.spark.report.results import DAY_US, merge
from notify.spark.result import Covered, Found, Result
from notify.spark.tables import manifest as manifests
from notify.spark.tables.reading import read_file, tidy, urls_of

T0 = 20_000 * DAY_US
MINUTE_US = 60_000_000
TOPIC = "orders"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/results"


def lost(number: int, at_us: int = 0) -> Found:
    return Found("LOST", f"00000000-0000-7000-8000-{number:012d}", at_us=at_us or T0 + number * MINUTE_US, topic=TOPIC)


def bucket(minute: int, messages: int, topic: str = TOPIC) -> dict[str, Any]:
    return dict.fromkeys(TOTALS, 0) | {
        "at_us": T0 + minute * MINUTE_US,
        "topic": topic,
        "messages": messages,
        "LOST": 0,
    }


def audit(
    first: int, end: int, found: list[Found], *, reasons: tuple[str, ...] = (), buckets: Any = None, **counts: int
) -> Result:
    """An audit of the minutes [first, end)."""
    return Result(
        "FINDINGS" if found else "PASS",
        list(reasons),
        counts={"LOST": len(found)} | counts,
        found=found,
        buckets=[bucket(n, 10) for n in range(first, end)] if buckets is None else buckets,
        bucket_us=MINUTE_US,
        from_us=T0 + first * MINUTE_US,
        to_us=T0 + end * MINUTE_US,
        coverage=[Covered("shop", "source", "all", "all", True)],
    )


def rows(url: str, table: str) -> list[dict[str, Any]]:
    store = Store(url)
    files = [file for file in manifests.files_of(store, manifests.load(store)) if file.table == table]
    return [row for file in files for row in read_file(store, file).to_pylist()]


def resolved(url: str) -> dict[int, int | None]:
    return {int(row["message_id"].split("-")[-1].split(".")[0]): row["resolved_us"] for row in rows(url, "findings")}


def test_audits_of_other_inputs_keep_their_results_apart(url: str) -> None:
    """The audit of one system called the findings of another one resolved, and took its figures out."""

    def of(identities: dict[str, str], found: list[Found]) -> Result:
        return replace(audit(0, 10, found), identities={**identities, "log log": "log log"})

    shop, bank = {"database 1": "database shop"}, {"database 2": "database bank"}
    merge(of(shop, [lost(1)]), url, 100)
    for others in (bank, {"database 3": "database shop"}):
        with pytest.raises(InvalidRequest, match=r"database shop was not given to this one.*another URL"):
            merge(of(others, []), url, 200)
    assert resolved(url) == {1: None}
    merge(of(shop | bank, [lost(1)]), url, 300)
    with pytest.raises(InvalidRequest, match="database bank was not given"):
        merge(of(shop, []), url, 400)
    merge(of({"database 1": "database renamed", "database 2": "database bank"}, []), url, 500)
    assert resolved(url) == {1: 500}


def test_a_finding_is_one_row_from_first_to_last(url: str) -> None:
    merge(audit(0, 10, [lost(1), lost(5)]), url, 100)
    merge(audit(0, 10, [lost(5)]), url, 200)
    merge(audit(5, 10, [lost(5), lost(7)]), url, 300)
    seen = {row["message_id"][-3:]: (row["first_seen_us"], row["last_seen_us"]) for row in rows(url, "findings")}
    assert seen == {"1.0": (100, 100), "5.0": (100, 300), "7.0": (300, 300)}
    assert resolved(url) == {1: 200, 5: None, 7: None}
    merge(audit(0, 10, [lost(1)]), url, 400)  # it is back
    assert resolved(url) == {1: None, 5: 400, 7: 400}


def test_a_finding_that_was_repaired_is_resolved(url: str) -> None:
    merge(audit(0, 10, [lost(1)]), url, 100)
    case = lost(1)
    case.evidence["repaired"] = True
    merge(audit(0, 10, [case], LOST=0), url, 200)
    merge(audit(0, 10, [case], LOST=0), url, 300)
    assert resolved(url) == {1: 200} and rows(url, "findings")[0]["last_seen_us"] == 300


def test_an_audit_keeps_rows_that_it_did_not_judge(url: str) -> None:
    merge(audit(0, 10, [lost(1), lost(5)]), url, 100)
    merge(audit(3, 10, []), url, 200)  # 1 is before its range
    assert resolved(url) == {1: None, 5: 200}
    merge(audit(0, 10, [lost(5)]), url, 300)
    merge(audit(0, 10, [], reasons=("a part of the log is missing",)), url, 400)
    assert resolved(url) == {1: 300, 5: None}
    merge(audit(0, 10, [lost(9)], LOST=50), url, 500)  # it shows only some of them
    assert resolved(url) == {1: 300, 5: None, 9: None}


def test_an_audit_of_everything_leaves_what_its_inputs_no_longer_have(url: str) -> None:
    merge(audit(0, 10, [lost(1), lost(8)]), url, 100)
    later = audit(5, 20, [])
    later.from_us = 0
    merge(later, url, 200)
    assert resolved(url) == {1: None, 8: 200}
    assert [row["at_us"] for row in rows(url, "buckets")] == [T0 + n * MINUTE_US for n in range(20)]


def test_buckets_are_replaced_in_the_range(url: str) -> None:
    merge(audit(0, 4, [], buckets=[bucket(0, 5), bucket(1, 5), bucket(1, 3, "gone"), bucket(2, 5)]), url)
    merge(audit(1, 4, [], buckets=[bucket(1, 6), bucket(2, 7), bucket(3, 8)]), url)
    assert [(r["topic"], r["messages"]) for r in rows(url, "buckets")] == [(TOPIC, n) for n in (5, 6, 7, 8)]
    cut = audit(1, 4, [], buckets=[bucket(2, 1), bucket(3, 9)])
    cut.from_us += MINUTE_US + MINUTE_US // 2  # it has the second half of minute 2 alone
    merge(cut, url)
    assert [r["messages"] for r in rows(url, "buckets")] == [5, 6, 7, 9]


def test_windows_that_cut_buckets_add_up(url: str) -> None:
    """A watch's windows begin at any second."""
    start_us = T0 + 20_000_000
    for window in range(3):
        result = audit(0, 0, [], buckets=[bucket(window, 4), bucket(window + 1, 2)])
        result.from_us, result.to_us = start_us + window * MINUTE_US, start_us + (window + 1) * MINUTE_US
        merge(result, url)
    found = [((r["at_us"] - T0) // 1_000_000, r["seconds"], r["messages"]) for r in rows(url, "buckets")]
    assert found == [(20, 40.0, 4), (60, 20.0, 2), (80, 40.0, 4), (120, 20.0, 2), (140, 40.0, 4), (180, 20.0, 2)]
    whole = audit(0, 4, [], buckets=[bucket(n, 6) for n in range(4)])
    merge(whole, url)
    assert [r["messages"] for r in rows(url, "buckets")] == [6] * 4


def test_a_long_history_is_rewritten_by_the_day(url: str) -> None:
    for day in range(3):
        minutes = range(day * 1440, day * 1440 + 2)
        result = audit(minutes[0], minutes[-1] + 1, [lost(minutes[0])])
        merge(result, url, 100 + day)
    before = set(urls_of(url, "buckets")) | set(urls_of(url, "findings"))
    counts = merge(audit(2880, 2882, []), url, 200)
    assert counts == {"findings": 3, "buckets": 6, "state": 2}
    after = set(urls_of(url, "buckets")) | set(urls_of(url, "findings"))
    assert len(before & after) == 5 and len(after) == 6  # that day's findings alone are another file
    assert len(tidy(url, 0)) > 0 and set(urls_of(url, "buckets")) <= after
    assert len(rows(url, "findings")) == 3


def test_state_is_what_the_newest_audit_saw_of_each_input(url: str) -> None:
    merge(audit(0, 1, []), url, 100)
    other = audit(1, 2, [lost(1)], reasons=("the log is stale",))
    other.verdict, other.coverage = "INCONCLUSIVE", [Covered("queue", "segments", "4", "3", False)]
    merge(other, url, 200)
    state = {(row["kind"], row["name"]): row for row in rows(url, "state")}
    assert state["source", "shop"]["audited_us"] == 100 and not state["segments", "queue"]["is_whole"]
    assert state["audit", "newest"]["read"] == "INCONCLUSIVE the log is stale"


def test_another_writer_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merge(audit(0, 1, []), url, 100)
    store = Store(url)
    before = manifests.load(store)
    manifests.replace(store, before, before)
    with pytest.raises(ObjectStoreFailed, match="another writer"):
        manifests.replace(store, before, before)


def test_a_url_with_something_else_is_refused(url: str, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "manifest.json").write_text("[]")
    with pytest.raises(InvalidRequest, match="not a manifest of a table"):
        merge(audit(0, 1, []), url)
    with pytest.raises(InvalidRequest):
        merge(audit(0, 1, []), "nowhere")


def test_a_file_that_was_changed_is_told(url: str) -> None:
    merge(audit(0, 1, []), url, 100)
    file = Path(urls_of(url, "buckets")[0].removeprefix("file://"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ObjectStoreFailed, match="differs"):
        merge(audit(0, 1, []), url, 200)


def test_a_long_table_has_pages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MOST_INLINE", 4)
    monkeypatch.setattr(manifests, "PAGE_FILES", 3)
    store = Store(url)
    manifest = manifests.Manifest()
    for n in range(12):
        file = manifests.File(f"data/{n}", 1, 1, "0")
        after = manifests.with_page(store, manifests.Manifest(pages=manifest.pages, files=(*manifest.files, file)))
        manifest = manifests.replace(store, manifest, after)
    assert [file.name for file in manifests.files_of(store, manifests.load(store))] == [f"data/{n}" for n in range(12)]
    assert manifest.rows == 12 and len(manifest.files) <= 4
