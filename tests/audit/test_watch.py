"""A watch says every finding exactly once, and alarms at least once, however it ends; it revises findings about late
messages, says when nothing can be judged, and stays within its bounds.

These tests use fake audits; test_watch_on_spark.py runs real ones. `make audit-watch` does the same beside a running
shop with real kills.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.cli import audit as audit_command
from notify.errors import Conflict, InvalidRequest, Unavailable
from notify.spark.result import Found, Plan, Result
from notify.spark.watch import alarms as alarms_module
from notify.spark.watch import ledger as ledger_module
from notify.spark.watch import watching
from notify.spark.watch.conditions import QUIET_SECONDS
from notify.spark.watch.ledger import DROPPED, Ledger, Position
from notify.spark.watch.lines import Lines
from notify.spark.watch.watching import DEATHS, Watch
from notify.storage import crash_point
from tests.audit.scripted_watch import BEGIN_US, SECOND, Hurried, Scripted
from tests.audit.trade import Trade
from tests.support.commands import cli
from tests.support.receiver import Receiver

WINDOWS = 4


class Killed(BaseException):
    """Stands for the death of the process."""


class Steps:
    """Each point that a watch reaches, and each audit and line, is a step at which it may be killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached: list[str] = []
        self.last = 0
        """The step at which the watch is killed; 0: never."""
        monkeypatch.setattr(crash_point, "reached", self.step)

    def begin(self, last: int = 0) -> None:
        self.reached, self.last = [], last

    def step(self, name: str) -> None:
        self.reached.append(name)
        if len(self.reached) == self.last:
            raise Killed


class Shop:
    """A shop that loses messages in the first and the third window; one of them only comes late."""

    def __init__(self, steps: Steps, alarm_url: str = "") -> None:
        self.lost = {BEGIN_US: ["a.0", "b.0"], BEGIN_US + 2 * SECOND: ["c.0"]}
        self.steps = steps
        self.said: list[dict[str, Any]] = []
        self._alarm_url = alarm_url
        self._latest_us = 0

    def begin(self, last_step: int = 0) -> None:
        """Start again without audits and lines."""
        self.steps.begin(last_step)
        self.said, self._latest_us = [], 0

    def audit(self, plan: Plan) -> Result:
        self.steps.step("audit")
        assert plan.closes_by_clock
        self._latest_us = max(self._latest_us, plan.from_us)
        lost = {name: at_us for at_us, names in self.lost.items() for name in names}
        if self._latest_us > plan.from_us:  # audited again
            del lost["a.0"]
        in_range = {name: at_us for name, at_us in lost.items() if plan.from_us <= at_us < plan.to_us}
        cases = [Found("LOST", name.partition(".")[0], at_us=at_us) for name, at_us in in_range.items()]
        return Result("FINDINGS" if cases else "PASS", found=cases, totals={"committed": 1})

    def emit(self, line: dict[str, Any]) -> None:
        self.steps.step("emit")
        self.said.append(line)

    def watch(self, state: Path) -> Watch:
        plan = Plan(BEGIN_US, 0, 1, 1)
        return Watch(self.audit, plan, state, window_seconds=1, emit=self.emit, alarm_url=self._alarm_url)

    def run(self, state: Path, windows: int) -> None:
        with contextlib.closing(self.watch(state)) as watch:
            watch.run(threading.Event(), windows)


def lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "findings.jsonl").read_text().splitlines()]


def watched_with_a_death(shop: Shop, state: Path, step: int, cut_line: bool) -> None:
    """Watch all windows, and kill the watch once."""
    shop.begin(step)
    with contextlib.suppress(Killed):
        shop.run(state, WINDOWS)
    if cut_line and (state / "findings.jsonl").exists():
        with (state / "findings.jsonl").open("a") as file:
            file.write('{"kind": "finding", "key": "LOST:cut sho')
    shop.steps.last = 0
    with contextlib.closing(shop.watch(state)) as again:
        done = (again.position.next_us - BEGIN_US) // SECOND
        again.run(threading.Event(), max(1, WINDOWS - done))


def test_a_watch_that_is_killed_anywhere_says_and_alarms_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    steps = Steps(monkeypatch)
    shop = Shop(steps, receiver.url)
    shop.begin()
    shop.run(tmp_path / "whole", WINDOWS + 1)
    whole, reached = shop.said, steps.reached
    assert [line["kind"] for line in whole] == ["finding", "finding", "window", "window", "finding", "window",
                                                "window", "revision", "window"]  # fmt: skip
    alarmed = sorted(f"LOST:{name}:" for name in ("a.0", "b.0", "c.0"))
    assert sorted(receiver.alarm_keys()) == alarmed
    renaming = {"watch.before_rename", "watch.after_rename"}
    assert set(crash_point.WATCH_POINTS) - set(reached) == renaming, "which have a test of their own"
    for step in range(1, len(reached) + 1):
        receiver.taken.clear()
        state = tmp_path / str(step)
        watched_with_a_death(shop, state, step, cut_line=step % 2 == 0)
        kept = Counter((line["kind"], line["key"]) for line in lines(state))
        assert kept == Counter((line["kind"], line["key"]) for line in lines(tmp_path / "whole")), step
        twice = reached[step - 1] == "watch.after_alarm"
        assert sorted(set(receiver.alarm_keys())) == alarmed and len(receiver.taken) == len(alarmed) + twice, step
        # An emitted line is not emitted again; those of the window at whose end the watch died are in the file.
        emitted = Counter((line["kind"], line["window_us"], line.get("key")) for line in shop.said)
        assert max(emitted.values()) == 1, step


def test_a_watch_begins_when_it_is_called(trade: Trade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark takes seconds to start. What was committed meanwhile was in no window."""
    plans: list[Plan] = []
    started: list[int] = []

    @contextlib.contextmanager
    def session(*_: Any) -> Iterator[None]:
        started.append(time.time_ns() // 1000)
        yield

    class Idle:
        def __init__(self, audit: Any, plan: Plan, *_: Any, **__: Any) -> None:
            plans.append(plan)

        def run(self, *_: Any) -> None:
            """Audit nothing."""

        close = run

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(audit_command, "session", session)
    monkeypatch.setattr(watching, "Watch", Idle)
    cli("audit", "watch", "--database", f"shop={trade.url('shop')}", "--log", str(trade.log), "--state", str(tmp_path))
    assert 0 < plans[0].from_us <= started[0]


def test_an_input_that_is_away_holds_the_window_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    shop = Shop(Steps(monkeypatch))
    away = [True, True, False]

    def audit(plan: Plan) -> Result:
        if away.pop(0):
            raise Unavailable("the database is unreachable")
        return shop.audit(plan)

    plan = Plan(BEGIN_US + SECOND, 0, 1, 1)
    watch = Watch(audit, plan, tmp_path / "state", window_seconds=1, emit=shop.emit, alarm_url=receiver.url)
    with contextlib.closing(watch):
        watch.run(Hurried(), 1)
    assert [line["kind"] for line in shop.said] == ["failure", "failure", "window"]
    assert shop.said[-1]["window_us"] == BEGIN_US + SECOND
    assert [body["detail"] for body in receiver.taken] == ["the database is unreachable"], "once for a window"


def test_a_window_in_which_the_process_dies_again_and_again_is_an_alarm(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    shop = Shop(steps, receiver.url)
    for _ in range(DEATHS):
        shop.begin(3)  # two points, then the audit
        with pytest.raises(Killed):
            shop.run(tmp_path, 1)
    assert receiver.taken == []
    shop.begin()
    shop.run(tmp_path, 1)
    assert [key.partition(":")[0] for key in receiver.alarm_keys()] == ["DIED", "LOST", "LOST"]


def test_inputs_that_no_longer_belong_together_are_an_alarm_before_the_watch_ends(
    tmp_path: Path, receiver: Receiver
) -> None:
    def made(start: int) -> Result:
        raise InvalidRequest("the log and the databases do not belong together")

    for _ in range(2):  # whoever starts it again hears it once
        with pytest.raises(InvalidRequest, match="belong together"):
            Scripted(tmp_path, made, receiver.url).run(1)
    assert [body["detail"] for body in receiver.taken] == ["the log and the databases do not belong together"]


def test_a_full_disk_under_the_state_holds_the_window_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    full = [True, True, False]
    add_lines = Ledger.add_lines

    def refuse(self: Ledger, lines: Any) -> None:
        if full.pop(0):
            raise sqlite3.OperationalError("database or disk is full")
        add_lines(self, lines)

    monkeypatch.setattr(Ledger, "add_lines", refuse)
    shop = Shop(Steps(monkeypatch), receiver.url)
    with contextlib.closing(shop.watch(tmp_path)) as watch:
        watch.run(Hurried(), 1)
    assert [line["kind"] for line in shop.said] == ["failure", "failure", "finding", "finding", "window"]
    assert [line["kind"] for line in lines(tmp_path)] == ["finding", "finding"]


def test_a_window_that_cannot_be_judged_is_an_alarm_with_its_reasons(tmp_path: Path, receiver: Receiver) -> None:
    reasons = {0: "log a ends at 10", 1: "log a ends at 11", 2: "database b is empty", 4: "log a ends at 14"}

    def made(start: int) -> Result:
        reason = reasons.get((start - BEGIN_US) // SECOND)
        return Result("INCONCLUSIVE" if reason else "PASS", [reason] if reason else [], totals={"committed": 1})

    said = Scripted(tmp_path, made, receiver.url).run(5)
    assert said.kinds() == ["inconclusive", "inconclusive", "over", "over", "inconclusive"]
    assert [body["detail"] for body in receiver.taken] == [reasons[0], reasons[2], reasons[4]]
    assert len(set(receiver.alarm_keys())) == 3
    assert [line["reasons"] for line in said.said if line["kind"] == "window"][1] == [reasons[1]]


def test_silence_is_an_alarm_only_after_an_hour(tmp_path: Path, receiver: Receiver) -> None:
    quiet = Result("INCONCLUSIVE", ["no local row lies in the audited range"], totals={"committed": 0, "rows": 0})
    windows = round(QUIET_SECONDS / 600)
    assert Scripted(tmp_path, lambda start: quiet, receiver.url, 600).run(windows - 1).kinds() == []
    assert Scripted(tmp_path, lambda start: quiet, receiver.url, 600).run(3).kinds() == ["inconclusive"]
    assert [body["detail"] for body in receiver.taken] == ["no input has had anything to audit for 1.0 h"]


def test_damage_without_a_time_is_said_once(tmp_path: Path, receiver: Receiver) -> None:
    damage = Result("FINDINGS", found=[Found("CORRUPT", detail="a frame", log="data")], totals={"committed": 1})
    for _ in range(2):
        Scripted(tmp_path, lambda start: damage, receiver.url).run(6)
    assert [line["kind"] for line in lines(tmp_path)] == ["finding"] and len(receiver.taken) == 1


@pytest.mark.parametrize(("fail_on", "said"), [((), []), (("DEAD",), ["finding"])])
def test_dead_letters_are_said_only_if_they_fail_an_audit(
    tmp_path: Path, receiver: Receiver, fail_on: tuple[str, ...], said: list[str]
) -> None:
    def made(start: int) -> Result:
        found = [Found("DEAD", "a", at_us=start)] if start == BEGIN_US else []
        return Result("FINDINGS" if found and fail_on else "PASS", found=found, totals={"committed": 1})

    assert Scripted(tmp_path, made, receiver.url, fail_on=fail_on).run(2).kinds() == said
    assert [body["finding"] for body in receiver.taken] == list(fail_on)


def test_an_audit_in_doubt_revises_nothing(tmp_path: Path) -> None:
    def made(start: int) -> Result:
        if watched.audits == 1:
            return Result("FINDINGS", found=[Found("LOST", "a", at_us=start)], totals={"committed": 1})
        return Result("INCONCLUSIVE", ["a segment is missing"], totals={"committed": 1})

    watched = Scripted(tmp_path, made)
    assert "revision" not in watched.run(6).kinds()


def test_alarms_wait_for_their_receiver(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms_module, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(alarms_module, "LONGEST_WAIT_SECONDS", 0.0)

    def made(start: int) -> Result:
        number = (start - BEGIN_US) // SECOND
        found = [Found("LOST", f"m{number}", at_us=start)] if number < 3 else []
        return Result("FINDINGS", found=found, totals={"committed": 1})

    receiver.status = 503
    Scripted(tmp_path, made, receiver.url).run(3)
    assert receiver.taken == []
    receiver.status, receiver.refuses = 204, "m1"
    Scripted(tmp_path, made, receiver.url).run(1)
    assert receiver.alarm_keys() == ["LOST:m0.0:", "LOST:m2.0:"], "what is refused holds up no other"
    receiver.refuses = ""
    Scripted(tmp_path, made, receiver.url).run(1)
    assert set(receiver.alarm_keys()) <= {f"LOST:m{n}.0:" for n in range(3)}
    with pytest.raises(InvalidRequest, match="alarm-url"):
        Scripted(tmp_path, made, "receiver:80")


def test_alarms_and_findings_that_are_known_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MOST_ALARMS", 10)
    monkeypatch.setattr(ledger_module, "MOST_KNOWN", 10)
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        for n in range(25):
            with ledger.transaction():
                ledger.add_alarm(f"LOST:{n}", {"kind": "finding"})
                ledger.bound_alarms()
                ledger.know(f"LOST:{n}", 0, n)
                ledger.forget()
        kept = ledger.alarms(1, 100)
        assert [a.key for a in kept if not a.key.startswith(DROPPED)] == [f"LOST:{n}" for n in range(15, 25)]
        (dropped,) = [a for a in kept if a.key.startswith(DROPPED)]
        assert dropped.body["dropped"] == 15 and dropped.body["key"] == dropped.key
        ledger.alarm_done(dropped.id)
        with ledger.transaction():
            ledger.add_alarm("LOST:25", {"kind": "finding"})
            ledger.bound_alarms()
        (again,) = [a for a in ledger.alarms(1, 100) if a.key.startswith(DROPPED)]
        assert again.body["dropped"] == 1 and again.key != dropped.key, "a receiver would take it for a repetition"
        assert [ledger.is_known(f"LOST:{n}") for n in (14, 15, 24)] == [False, True, True]


@pytest.mark.long
def test_lines_go_to_files_of_a_bounded_size_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)

    def write(state: Path, kept_files: int) -> None:
        with contextlib.closing(Ledger(state)) as ledger:
            if ledger.position is None:
                with ledger.transaction():
                    ledger.move(Position(0))
            Lines(ledger, 100, kept_files).write()
            while ledger.position is not None and ledger.position.window < 20:
                with ledger.transaction():
                    number = ledger.position.window
                    ledger.add_lines([{"n": number}, {"n": number + 0.5}])
                    ledger.move(
                        Position(
                            **{f: getattr(ledger.position, f) for f in Position.__slots__} | {"window": number + 1}
                        )
                    )
                Lines(ledger, 100, kept_files).write()

    write(tmp_path / "whole", 1000)
    count = len(steps.reached)
    assert {"watch.before_rename", "watch.after_rename"} <= set(steps.reached)
    wanted = [n / 2 for n in range(40)]
    for step in range(1, count + 1):
        steps.begin(step)
        state = tmp_path / str(step)
        with contextlib.suppress(Killed):
            write(state, 1000)
        steps.last = 0
        write(state, 1000)
        files = [*sorted(state.glob("findings-*.jsonl")), state / "findings.jsonl"]
        written = [json.loads(line)["n"] for f in files if f.exists() for line in f.read_text().splitlines()]
        assert written == wanted, step
    write(tmp_path / "bounded", 2)
    assert len(list((tmp_path / "bounded").glob("findings-*.jsonl"))) == 2


def test_one_watch_at_a_time_has_a_state(tmp_path: Path) -> None:
    watched = Scripted(tmp_path, lambda start: Result("PASS"))
    with contextlib.closing(watched.watch), pytest.raises(Conflict, match="another watch"):
        Scripted(tmp_path, lambda start: Result("PASS"))
    (tmp_path / "watch.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(InvalidRequest, match="damaged"):
        Scripted(tmp_path, lambda start: Result("PASS"))


def test_a_state_that_cannot_be_opened_is_not_another_watch(tmp_path: Path) -> None:
    (tmp_path / "watch.db").mkdir()
    with pytest.raises(Unavailable, match="cannot be opened"):
        Scripted(tmp_path, lambda start: Result("PASS"))


def test_after_the_loss_of_the_state_no_finding_is_reported_twice(tmp_path: Path) -> None:
    def made(start: int) -> Result:
        return Result("FINDINGS", found=[Found("LOST", f"t{start}", at_us=start)], totals={"committed": 1})

    Scripted(tmp_path, made).run(2)
    (tmp_path / "watch.db").unlink()
    with (tmp_path / "findings.jsonl").open("a") as file:
        file.write('{"kind": "find')  # a kill cut it short
    assert Scripted(tmp_path, made).run(3).kinds() == ["inconclusive", "finding"]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_state_that_was_lost_is_an_alarm(tmp_path: Path, receiver: Receiver, harm: Callable[[Path], Any]) -> None:
    """Windows that were due while the watch was down are in no window of the one that begins without its state."""

    def made(start: int) -> Result:
        return Result("FINDINGS", found=[Found("LOST", f"t{start}", at_us=start)], totals={"committed": 1})

    Scripted(tmp_path, made).run(1)
    harm(tmp_path / "watch.db")
    Scripted(tmp_path, made, receiver.url).run(1)
    Scripted(tmp_path, made, receiver.url).run(1)
    assert [(body["kind"], "watch.db) is gone" in body["detail"]) for body in receiver.taken] == [
        ("inconclusive", True), ("finding", False),
    ]  # fmt: skip
    assert [line["kind"] for line in lines(tmp_path)] == ["finding", "inconclusive", "finding"]
    fresh = Scripted(tmp_path / "fresh", made, receiver.url)
    with contextlib.closing(fresh.watch):
        assert fresh.kinds() == [], "a new watch has lost nothing"


def test_a_state_of_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    Scripted(tmp_path, lambda start: Result("PASS", totals={"committed": 1})).run(1)
    with contextlib.closing(sqlite3.connect(tmp_path / "watch.db")) as state:
        (version,) = state.execute("PRAGMA user_version").fetchone()
        state.execute(f"PRAGMA user_version = {version + 1}")
        state.execute("ALTER TABLE known ADD COLUMN more INTEGER")
    before = (tmp_path / "watch.db").read_bytes()
    with pytest.raises(InvalidRequest, match="newer version"):
        Scripted(tmp_path, lambda start: Result("PASS"))
    assert (tmp_path / "watch.db").read_bytes() == before


def test_a_state_that_is_damaged_while_it_is_used_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again for ever, it would say nothing: an alarm needs the state."""

    def malformed(*given: Any) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    watched = Scripted(tmp_path, lambda start: Result("PASS", totals={"committed": 1}))
    monkeypatch.setattr(Ledger, "add_lines", malformed)
    with contextlib.closing(watched.watch), pytest.raises(sqlite3.DatabaseError, match="malformed"):
        watched.watch.run(Hurried(), 1)


def test_a_clock_that_is_far_behind_what_was_audited_is_an_alarm(tmp_path: Path, receiver: Receiver) -> None:
    """It was a day ahead when the windows were audited: nothing is due for a day."""
    now = BEGIN_US / 1e6 + 86_400
    said: list[str] = []

    def watch(stop: threading.Event, windows: int) -> int:
        """Watch from ten seconds ago on; where the next window begins."""
        watch = Watch(
            lambda plan: Result("PASS", totals={"committed": 1}), Plan(int(now - 10) * SECOND, 0, 1, 1), tmp_path,
            window_seconds=1, emit=lambda line: said.append(line["kind"]), alarm_url=receiver.url, clock=lambda: now,
        )  # fmt: skip
        with contextlib.closing(watch):
            watch.run(stop, windows)
            return watch.position.next_us

    next_us = watch(threading.Event(), 2)
    now = BEGIN_US / 1e6
    watch(StopsSoon(), 1)
    watch(StopsSoon(), 1)
    now = next_us / 1e6 + 10
    watch(threading.Event(), 1)
    assert said == ["window", "window", "inconclusive", "over", "window"], "once while it lasts"
    assert [(body["kind"], "clock says" in body["detail"]) for body in receiver.taken] == [("inconclusive", True)]


class StopsSoon(threading.Event):
    """A stop event that comes while the watch waits for the second time."""

    def wait(self, timeout: float | None = None) -> bool:
        was_waited_for, self.was_waited_for = getattr(self, "was_waited_for", False), True
        return was_waited_for


def test_left_out_messages_are_reported_only_if_they_fail_an_audit(tmp_path: Path, receiver: Receiver) -> None:
    def made(start: int) -> Result:
        found = [Found("LEFT_OUT", "a", groups=["points"], at_us=start)] if start == BEGIN_US else []
        return Result("FINDINGS" if found else "PASS", found=found, totals={"committed": 1})

    assert Scripted(tmp_path / "counted", made, receiver.url).run(2).kinds() == []
    failing = Scripted(tmp_path / "failing", made, receiver.url, fail_on=("LEFT_OUT",)).run(2)
    assert failing.kinds() == ["finding"]
    assert [body["key"] for body in receiver.taken] == ["LEFT_OUT:a.0:points"]
