"""Alarms that a watch must not lose: inputs that disappear, redirects, reasons that differ by a digit of a name."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from notify.errors import InvalidRequest
from notify.spark.result import Plan, Result
from notify.spark.watch.ledger import Ledger
from notify.spark.watch.lines import Lines
from notify.spark.watch.watching import Watch
from tests.audit.scripted_watch import BEGIN_US, Hurried
from tests.support.commands import cli
from tests.support.receiver import Receiver

PLAN = Plan(BEGIN_US, 0, 1, 1)


def watched(state: Path, url: str, results: list[Result | Exception], windows: int) -> None:
    """Watch with audits that end like this, one after the other."""

    def audit(plan: Plan) -> Result:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    with contextlib.closing(Watch(audit, PLAN, state, window_seconds=1, alarm_url=url)) as watch:
        watch.run(Hurried(), windows)


def result(*reasons: str) -> Result:
    return Result("PASS", totals={"committed": 1}, reasons=list(reasons))


def test_an_input_that_disappears_is_an_alarm_and_the_watch_goes_on(tmp_path: Path, receiver: Receiver) -> None:
    gone = InvalidRequest("--log /data: there is no such directory")
    watched(tmp_path, receiver.url, [result(), gone, gone, result()], 2)
    assert [body["detail"] for body in receiver.taken] == [str(gone)]
    with pytest.raises(InvalidRequest):
        watched(tmp_path / "new", receiver.url, [gone], 1)  # wrong flags


def test_an_input_that_is_gone_when_the_watch_starts_is_an_alarm(tmp_path: Path, receiver: Receiver) -> None:
    words = ["audit", "watch", "--database", f"sqlite:///{tmp_path}/shop.db", "--log", f"{tmp_path}/gone"]
    words += ["--alarm-url", receiver.url, "--state"]
    assert cli(*words, str(tmp_path / "new"))[0] == 2 and not receiver.taken
    watched(tmp_path / "state", receiver.url, [result()], 1)
    for _ in range(2):
        assert cli(*words, str(tmp_path / "state"))[0] == 2
    (alarm,) = receiver.taken
    assert "there is no such directory" in alarm["detail"]


def test_each_of_two_groups_is_an_alarm(tmp_path: Path, receiver: Receiver) -> None:
    def wiped(number: int, count: int) -> str:
        return f"the consumers of group points{number} have an inbox since 2026-11-23 04:1{count}:00Z: {count} rows"

    watched(tmp_path, receiver.url, [result(wiped(1, 3)), result(wiped(1, 4), wiped(2, 4), "group 7: x")], 2)
    assert [body["detail"] for body in receiver.taken] == [wiped(1, 3), "group 7: x", wiped(2, 4)]


def test_a_redirect_takes_no_alarm(tmp_path: Path, receiver: Receiver) -> None:
    receiver.location = receiver.url
    receiver.status = 302
    watched(tmp_path, receiver.url, [result("a segment is missing")], 1)
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        assert ledger.alarms_waiting() == 1
    receiver.status = 204
    watched(tmp_path, receiver.url, [result("a segment is missing")], 1)
    assert len(receiver.taken) == 1


def test_a_full_disk_while_alarms_are_sent_does_not_end_the_watch(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    done = Ledger.alarm_done

    def refuse(self: Ledger, number: int) -> None:
        if full:
            full.pop()
            raise sqlite3.OperationalError("database or disk is full")
        done(self, number)

    monkeypatch.setattr(Ledger, "alarm_done", refuse)
    for _ in range(2):
        watched(tmp_path, receiver.url, [result("a segment is missing")], 1)
    assert len(receiver.taken) == 2 and len(set(receiver.alarm_keys())) == 1, "at least once"


def test_a_host_that_cannot_be_a_name_is_a_receiver_that_is_away(tmp_path: Path) -> None:
    watched(tmp_path, f"http://{'a' * 70}.example/", [result("a segment is missing")], 1)
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        assert ledger.alarms_waiting() == 1


def test_a_new_ledger_takes_a_number_that_no_file_has(tmp_path: Path) -> None:
    (tmp_path / "findings-000001.jsonl").write_text('{"kind": "older"}\n')
    (tmp_path / "findings.jsonl").write_text('{"kind": "finding", "key": "LOST:a.0", "window_us": 1}\n')
    watched(tmp_path, "", [result()], 1)
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        lines = Lines(ledger, file_bytes=1)
        for n in range(2):
            with ledger.transaction():
                ledger.add_lines([{"n": n}])
            lines.write()
    kept = sorted(tmp_path.glob("findings*.jsonl"))
    told = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert [line for line in told if line.get("kind") != "inconclusive"] == [
        {"kind": "older"}, {"kind": "finding", "key": "LOST:a.0", "window_us": 1}, {"n": 0}, {"n": 1},
    ]  # fmt: skip
