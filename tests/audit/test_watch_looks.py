"""A watch looks at its windows again: what goes wrong after a window's first audit is found, at a bounded cost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.client.tables.definitions import half_message
from notify.errors import Unavailable
from notify.protocol import ids
from notify.spark.checks.rows_outside_range import strays
from notify.spark.inputs.databases import Database
from notify.spark.result import Found, Plan, Result
from notify.spark.watch import ledger as ledger_module
from notify.spark.watch.looks import LATER, LOOKS, ROUND, SOON
from notify.spark.watch.watching import DEATHS, Watch
from notify.storage import crash_point
from notify.storage.sql.rows import moment_of
from tests.audit.scripted_watch import BEGIN_US, SECOND, Scripted
from tests.audit.trade import Trade, row_of
from tests.support.receiver import Receiver
from tools.bench.made_run import transaction_id

MOST_AUDITS = 1 + 13 / 24
"""For each window, as docs/audit-watch.md says."""


class Shop:
    """Its faults show from an audit on."""

    def __init__(self, state: Path, alarm_url: str = "") -> None:
        self.faults: dict[int, str] = {}
        """By the second in which they are: the transactions that lack an effect."""
        self.watch = Watch(
            self._audit, Plan(BEGIN_US, 0, 1, 1), state, window_seconds=1, alarm_url=alarm_url,
            emit=lambda line: self.said.append((line["kind"], line.get("key", ""))),
        )  # fmt: skip
        self.said: list[tuple[str, str]] = []
        self.ranges: list[tuple[int, int]] = []
        """The ranges that were audited, in seconds since the beginning."""
        self.doubts_looks = False
        """Whether looks find a part of the log missing."""
        self.from_us = 0

    def _audit(self, plan: Plan) -> Result:
        start, end = (plan.from_us - BEGIN_US) // SECOND, (plan.to_us - BEGIN_US) // SECOND
        self.ranges.append((start, end))
        found = [
            Found("ACKED_NO_EFFECT", name, groups=["points"], at_us=BEGIN_US + second * SECOND)
            for second, name in self.faults.items()
            if start <= second < end
        ]
        inputs = [{"input": "database shop", "watermark_us": 1 << 60, "from_us": self.from_us}]
        is_doubtful = self.doubts_looks and end - start > 1
        reasons = [f"bytes {start} to {end} of the log queue are missing"] if is_doubtful else []
        return Result("FINDINGS" if found else "PASS", reasons, totals={"committed": 1}, found=found, inputs=inputs)

    def run(self, windows: int) -> list[tuple[str, str]]:
        """Watch for some windows: what is said, but for the lines of windows."""
        self.said.clear()
        self.ranges.clear()
        self.watch.run(threading.Event(), windows)
        return [line for line in self.said if line[0] != "window"]

    @property
    def looked(self) -> list[tuple[int, int]]:
        return [each for each in self.ranges if each[1] - each[0] > 1]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    with contextlib.closing(shop.watch):
        yield shop


def key(name: str) -> str:
    return f"ACKED_NO_EFFECT:{name}.0:points"


@pytest.mark.long
@pytest.mark.parametrize(
    ("deleted_after", "found_by"),
    [(1, SOON.behind + SOON.at_once), (4, LATER.behind + LATER.at_once), (48, ROUND.behind + ROUND.at_once + 2)],
)
def test_an_effect_that_is_deleted_later_is_found_once(shop: Shop, deleted_after: int, found_by: int) -> None:
    assert shop.run(deleted_after) == []
    shop.faults[0] = "deleted"
    assert shop.run(found_by - deleted_after) == [("finding", key("deleted"))]
    assert shop.run(100) == [], "once"
    del shop.faults[0]
    assert shop.run(100) == [("revision", key("deleted"))], "it was put right"


@pytest.mark.long
def test_every_window_is_looked_at_soon_later_and_in_each_round(shop: Shop) -> None:
    shop.run(250)
    short = [each for each in shop.looked if each[1] - each[0] == SOON.at_once]
    long = [each for each in shop.looked if each[1] - each[0] == LATER.at_once]
    assert short == [(n, n + 3) for n in range(0, 247, 3)]
    of_round = [each for each in long if each[0] == 0]
    assert len(of_round) >= 3, "one look later, and at least two rounds"
    assert {n for a, b in long for n in range(a, b)} == set(range(max(b for _, b in long)))


@pytest.mark.long
def test_looks_cost_no_more_than_a_bound(shop: Shop) -> None:
    shop.faults = {second: f"t{second}" for second in range(240)}
    shop.run(240)
    assert len(shop.ranges) <= 240 * MOST_AUDITS
    windows = [n for n, each in enumerate(shop.ranges) if each[1] - each[0] == 1]
    assert all(b - a <= 2 for a, b in zip(windows, windows[1:], strict=False)), "one look after a window at most"
    assert sum(1 / look.every for look in LOOKS) == pytest.approx(MOST_AUDITS - 1)


def test_windows_beyond_retention_are_not_audited_again(shop: Shop) -> None:
    shop.run(100)
    shop.from_us = BEGIN_US + 90 * SECOND + 1
    shop.run(1)
    shop.run(100)
    assert shop.looked and min(start for start, _ in shop.looked) >= 91


@pytest.mark.long
def test_findings_that_are_forgotten_are_not_said_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MOST_KNOWN", 20)
    shop.faults = {second: f"t{second}" for second in range(100)}
    assert len(shop.run(100)) == 100
    assert shop.run(200) == []
    shop.faults[250] = "new"
    assert shop.run(100) == [("finding", key("new"))], "of a window of which all is known"


def test_reasons_of_looks_are_said_once_and_revise_nothing(shop: Shop) -> None:
    shop.faults[0] = "a"
    assert shop.run(3) == [("finding", key("a"))]
    del shop.faults[0]
    shop.doubts_looks = True
    (said,) = shop.run(60)
    assert said[0] == "inconclusive"


def test_findings_that_an_audit_does_not_show_are_not_revised(tmp_path: Path) -> None:
    def made(start: int) -> Result:
        """An audit shows one of 1,000 lost messages."""
        found = [Found("LOST", f"t{start}", at_us=start)]
        return Result("FINDINGS", found=found, counts={"LOST": 1000}, totals={"committed": 1})

    assert Scripted(tmp_path, made).run(20).kinds() == ["finding"] * 20


def test_a_group_that_catches_up_is_no_news_of_the_other(tmp_path: Path, receiver: Receiver) -> None:
    behind = ["mails", "points"]

    def made(start: int) -> Result:
        case = Found("UNDELIVERED", "a", 0, f"not settled by {', '.join(behind)}", groups=list(behind), at_us=start)
        found = [case] if start == BEGIN_US else []
        return Result("FINDINGS" if found else "PASS", found=found, totals={"committed": 1})

    both = Scripted(tmp_path, made, receiver.url).run(3)
    assert [line["key"] for line in both.said if line["kind"] == "finding"] == [
        "UNDELIVERED:a.0:mails", "UNDELIVERED:a.0:points",
    ]  # fmt: skip
    behind.remove("mails")
    one = Scripted(tmp_path, made, receiver.url).run(1)
    assert [(line["kind"], line["key"]) for line in one.said if line["kind"] != "window"] == [
        ("revision", "UNDELIVERED:a.0:mails"),
    ]  # fmt: skip
    assert [body["detail"] for body in receiver.taken] == ["not settled by mails", "not settled by points"]


def test_a_second_group_that_leaves_a_message_out_is_no_news_of_the_first(tmp_path: Path, receiver: Receiver) -> None:
    """The finding of the first group stands, with its own cause."""
    left = ["mails"]

    def made(start: int) -> Result:
        told = tuple(f"not settled by {group}: a reset skipped it; nobody knows who" for group in left)
        case = Found("LEFT_OUT", "a", detail="; ".join(told), groups=list(left), at_us=start, of_groups=told)
        found = [case] if start == BEGIN_US else []
        return Result("FINDINGS" if found else "PASS", found=found, totals={"committed": 1})

    Scripted(tmp_path, made, receiver.url, fail_on=("LEFT_OUT",)).run(1)
    left.append("points")
    later = Scripted(tmp_path, made, receiver.url, fail_on=("LEFT_OUT",)).run(4)
    assert [(line["kind"], line["key"]) for line in later.said if line["kind"] != "window"] == [
        ("finding", "LEFT_OUT:a.0:points"),
    ]  # fmt: skip
    assert [body["detail"] for body in receiver.taken] == [
        f"not settled by {group}: a reset skipped it; nobody knows who" for group in left
    ]


class Killed(BaseException):
    """Stands for the death of the process."""


def test_a_look_that_ends_the_process_again_and_again_is_left_out(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(name: str) -> None:
        if name == "watch.before_look" and watched.watch.position.window < 20:
            raise Killed

    monkeypatch.setattr(crash_point, "reached", reached)
    deaths = 0
    for _ in range(20):
        watched = Scripted(tmp_path, lambda start: Result("PASS", totals={"committed": 1}), receiver.url)
        try:
            watched.run(1)
        except Killed:
            deaths += 1
    assert deaths == 3 * DEATHS and [body["kind"] for body in receiver.taken] == ["failure"] * 3
    assert all("failed 3 times" in body["detail"] for body in receiver.taken)


def test_a_look_that_fails_does_not_hold_up_the_watch(tmp_path: Path, receiver: Receiver) -> None:
    plans: list[Plan] = []

    def audit(plan: Plan) -> Result:
        plans.append(plan)
        if plan.to_us - plan.from_us > SECOND:
            raise Unavailable("there is too little memory")
        return Result("PASS", totals={"committed": 1})

    watch = Watch(audit, Plan(BEGIN_US, 0, 1, 1), tmp_path, window_seconds=1, alarm_url=receiver.url)
    with contextlib.closing(watch):
        watch.run(threading.Event(), 12)
        assert watch.position.window == 12
    details = [body["detail"] for body in receiver.taken]
    assert details[0] == "there is too little memory" and len(set(receiver.alarm_keys())) == len(details)
    assert any("failed 3 times" in detail for detail in details)


@pytest.mark.long
def test_a_finding_that_is_back_after_its_revision_is_an_alarm_of_its_own(tmp_path: Path, receiver: Receiver) -> None:
    shop = Shop(tmp_path, receiver.url)
    with contextlib.closing(shop.watch):
        shop.run(1)
        for _ in range(3):
            shop.faults[0] = "deleted"
            assert shop.run(100) == [("finding", key("deleted"))]
            del shop.faults[0]
            assert shop.run(100) == [("revision", key("deleted"))]
    assert receiver.alarm_keys() == [key("deleted"), f"{key('deleted')}#2", f"{key('deleted')}#3"]
    assert len(set(receiver.names)) == 3
    # A watch that has lost its state knows it from findings.jsonl.
    (tmp_path / "watch.db").unlink()
    again = Shop(tmp_path, receiver.url)
    with contextlib.closing(again.watch):
        again.faults[0] = "deleted"
        again.run(1)
    assert receiver.alarm_keys()[-1] == f"{key('deleted')}#4"


def test_a_look_that_fails_in_each_round_is_an_alarm_in_each_round(tmp_path: Path, receiver: Receiver) -> None:
    fails = []

    def audit(plan: Plan) -> Result:
        if plan.from_us == BEGIN_US and plan.to_us - plan.from_us == ROUND.at_once * SECOND and fails:
            raise fails.pop()
        return Result("PASS", totals={"committed": 1})

    watch = Watch(audit, Plan(BEGIN_US, 0, 1, 1), tmp_path, window_seconds=1, alarm_url=receiver.url)
    with contextlib.closing(watch):
        for _ in range(3):
            fails.append(Unavailable("there is too little memory"))
            while fails:
                watch.run(threading.Event(), 1)
            watch.run(threading.Event(), 30)  # the look succeeds
    assert len(set(receiver.names)) == len(receiver.names) == 3


@pytest.mark.long
def test_each_round_looks_for_rows_with_ids_from_before_the_watch(tmp_path: Path) -> None:
    watched = Scripted(tmp_path, lambda start: Result("PASS", totals={"committed": 1})).run(400)
    strays = [plan for plan in watched.plans if plan.with_strays]
    assert len(strays) >= 2 and {plan.from_us for plan in strays} == {BEGIN_US}
    rounds = [plan for plan in watched.plans if plan.from_us == BEGIN_US and plan.to_us - plan.from_us > 3 * SECOND]
    assert len(rounds) == len(strays) + 1, "the look that follows later begins there, too, once"


def test_a_row_that_was_written_long_after_its_id_was_made_is_found(trade: Trade) -> None:
    """Its id lies in no window of a watch, and no half says when it was stored."""
    begun_us, slack_us = trade.at(100), 60 * SECOND
    old = {n: ids.to_text(transaction_id(9000 + n, begun_us - n * 86_400 * SECOND)) for n in (1, 2, 3)}
    engine = sa.create_engine(trade.url("shop"))
    with engine.begin() as connection:
        for n, fields in ((1, {}), (2, {"state": "ROLLED_BACK"}), (3, {"created_at": moment_of(begun_us - SECOND)})):
            row = row_of(trade, 200, transaction_id=old[n])
            connection.execute(half_message.insert().values(row | fields))
    engine.dispose()
    with contextlib.closing(Database(trade.url("shop"), "shop")) as database:
        (stray,) = strays(database, begun_us, slack_us)
    assert (stray.finding, stray.transaction_id, stray.at_us) == ("MISDATED", old[1], trade.at(200) + 20)
    assert "24.00 hours" in stray.detail
