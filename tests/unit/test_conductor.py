"""The demo's conductor kills by progress alone: here on a simulated machine that may be as slow as the test wants."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

from notify.cli.demo_shop import conductor
from notify.cli.demo_shop.books import Counts
from notify.cli.demo_shop.conductor import Conductor
from notify.cli.demo_shop.end import POINTS, End, Lost
from notify.cli.demo_shop.proof import DemoFailed, Proof

CHECKED_AFTER_SECONDS = 5.0


class Machine:
    """Children, topology, books and clock in one. A process takes `start_seconds` to start, and then does `rate` things
    a second."""

    def __init__(self, start_seconds: float = 40.0, rate: float = 3.0) -> None:
        self.now_seconds = 1000.0
        self.start_seconds = dict.fromkeys(self.names(), start_seconds)
        self.rate = rate
        self.exit_codes: dict[str, int] = {}
        """The names of the processes that end by themselves as soon as they have started."""
        self.ended_parts: dict[str, int] = {}
        self.asks = True
        self.undelivered = 0
        """The number of orders that never take effect."""
        self.killed: list[tuple[str, int]] = []
        """Each process that was killed, with its count of things done; a part, with the orders since the last kill."""
        self._running: dict[str, tuple[str, float, End | None]] = {}
        self._done: dict[str, int] = {}
        """The count of things done in each life that is over."""
        self._lost: list[tuple[float, Lost]] = []
        self._lives = 0
        self._stopped_at: float | None = None
        self.orders_at_part = 0
        """The number of orders when the last part came back."""
        self.first_order_at: float | None = None

    # --- clock ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.now_seconds

    def sleep(self, seconds: float) -> None:  # seconds of the test's clock
        self.now_seconds += seconds

    # --- children ---------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return ["producer 1", "producer 2", "consumer"]

    def start(self, name: str, end: End | None) -> str:
        self._lives += 1
        process = f"{name} (life {self._lives})"
        self._running[name] = (process, self.now(), end)
        return process

    def kill(self, name: str) -> None:
        process, _, _ = self._running[name]
        self._done[process] = self._progress(name)
        self.killed.append((name, self._done[process]))

    def exit_code(self, name: str) -> int | None:
        process, started_at, end = self._running[name]
        if name in self.exit_codes and self.now() - started_at > self.start_seconds[name]:
            return self.exit_codes[name]
        if end is None or self._stopped_at is not None or self._progress(name) <= end.progress:
            return None
        if process not in self._done:
            self._done[process] = self._progress(name)
            self._lost.append((self.now(), Lost(f"transaction {process}", process, POINTS[end.point])))
        return -signal.SIGKILL

    def lost(self) -> list[Lost]:
        return [lost for _, lost in self._lost]

    def stop_orders(self) -> None:
        self._stopped_at = self.now()

    def orders_have_stopped(self) -> bool:
        return self._stopped_at is not None and self.now() > self._stopped_at + 1

    def last_words(self) -> dict[str, list[str]]:
        return {name: ["Traceback", f"ImportError: no {name}"] for name in self.names()} | {"server": ["disk full"]}

    def _progress(self, name: str) -> int:
        _, started_at, _ = self._running[name]
        until = self.now() if self._stopped_at is None or name == "consumer" else self._stopped_at
        return max(0, round((until - started_at - self.start_seconds[name]) * self.rate))

    # --- books ------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        by_process = dict(self._done) | {life[0]: self._progress(name) for name, life in self._running.items()}
        orders = {process: count for process, count in by_process.items() if "producer" in process and count}
        effects = {process: count for process, count in by_process.items() if "consumer" in process and count}
        if orders and self.first_order_at is None:
            self.first_order_at = self.now()
        if self._stopped_at is not None:
            effects = {"consumer": sum(orders.values()) - self.undelivered}
        return Counts(orders, effects)

    # --- topology ---------------------------------------------------------------------------------------------

    def parts(self) -> list[str]:
        return ["server", "bridge"]

    def ended(self) -> dict[str, int]:
        return self.ended_parts

    def undecided(self) -> list[dict[str, Any]]:
        return [{"id": lost.transaction, "age": age} for age, lost in self._ages() if not self._is_asked(age)]

    def transaction(self, transaction_id: str) -> dict[str, Any]:
        (point,) = {lost.point for _, lost in self._lost if lost.transaction == transaction_id}
        answer, state = ("COMMIT", "COMMITTED") if point.startswith("between COMMIT") else ("ROLLBACK", "ROLLED_BACK")
        return {"state": state, "checks": [{"what": "asked"}, {"what": answer}]}

    def lag(self, unsettled: int) -> int:
        return unsettled

    def _ages(self) -> list[tuple[float, Lost]]:
        return [(self.now() - since, lost) for since, lost in self._lost]

    def _is_asked(self, age: float) -> bool:
        return self.asks and age > CHECKED_AFTER_SECONDS


class Topology:
    """The machine's parts; they are killed by names of their own, apart from the processes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def kill(self, part: str) -> None:
        committed = self.machine.counts().committed
        self.machine.killed.append((part, committed - self.machine.orders_at_part))
        self.machine.sleep(120)  # the part takes its time to come back, too
        self.machine.orders_at_part = self.machine.counts().committed


def play(machine: Any, seconds: float = 18.0) -> Proof:
    proof = Proof()
    chance = random.Random(7)
    Conductor(machine, Topology(machine), machine, proof, lambda *_: None, chance, seconds, machine).run()
    return proof


@pytest.mark.parametrize("start_seconds", [0.1, 5.0, 40.0, 150.0])
def test_nobody_is_killed_before_it_got_somewhere(start_seconds: float) -> None:
    machine = Machine(start_seconds)
    proof = play(machine)
    processes = [(name, progress) for name, progress in machine.killed if name in machine.names()]
    assert {name for name, _ in processes} >= {"consumer"} and len(processes) >= 2
    assert all(progress >= conductor.LIFE_PROGRESS[0] for _, progress in processes), processes
    parts = [(name, progress) for name, progress in machine.killed if name in machine.parts()]
    assert [name for name, _ in parts] == ["server", "bridge"] and all(progress for _, progress in parts), parts
    assert proof.killed == {
        "producer": sum(name.startswith("producer") for name, _ in processes),
        "consumer": sum(name == "consumer" for name, _ in processes),
        "server": 1,
        "bridge": 1,
    }


def test_it_goes_on_until_each_goal_is_met() -> None:
    machine = Machine()
    proof = play(machine)
    assert machine.first_order_at is not None and machine.now() - machine.first_order_at > 18
    assert proof.committed >= conductor.ORDERS
    assert all(times >= 1 for times in proof.killed_at.values()), proof.killed_at
    assert set(proof.in_doubt) == {"COMMITTED", "ROLLED_BACK"}
    assert {(lost.point, lost.state) for lost in proof.lost} == {
        ("between COMMIT and outcome", "COMMITTED"),
        ("between half and COMMIT", "ROLLED_BACK"),
    }
    assert not proof.failure and proof.undecided == 0


def test_few_seconds_need_fewer_orders() -> None:
    assert 50 < play(Machine(rate=0.5), seconds=5).committed < conductor.ORDERS


def test_a_machine_without_orders_fails_with_the_last_words() -> None:
    with pytest.raises(DemoFailed) as failure:
        play(Machine(start_seconds=1e9))
    assert str(failure.value).startswith("no order was committed within 180 s; ImportError: no producer 1")


@pytest.mark.parametrize("name", ["producer 2", "consumer"])
def test_who_ends_by_itself_is_named_with_its_last_words(name: str) -> None:
    machine = Machine()
    machine.exit_codes[name] = 1
    with pytest.raises(DemoFailed) as failure:
        play(machine)
    process, _, why = str(failure.value).partition(" ended by itself ")
    assert process.startswith(f"{name} (life ") and why == f"with exit code 1: ImportError: no {name}"


def test_a_part_that_ends_by_itself_is_named() -> None:
    machine = Machine()
    machine.ended_parts = {"server": 3}
    with pytest.raises(DemoFailed, match=r"^the server ended by itself with exit code 3: disk full$"):
        play(machine)


def test_a_sigkill_that_nobody_planned_is_a_failure() -> None:
    machine = Machine()
    machine.exit_codes["producer 1"] = -signal.SIGKILL
    with pytest.raises(DemoFailed, match=r"^producer 1 \(life 1\) ended by itself with exit code -9"):
        play(machine)


def test_a_consumer_that_gets_nowhere_is_waited_for_no_longer_than_its_bound() -> None:
    machine = Machine()
    machine.start_seconds["consumer"] = 1e9
    with pytest.raises(DemoFailed, match=r"^consumer \(life 3\) had no effect within 180 s: ImportError"):
        play(machine)
    assert machine.killed == [(name, progress) for name, progress in machine.killed if name.startswith("producer")]


def test_without_an_answer_to_a_check_there_is_no_end() -> None:
    machine = Machine()
    machine.asks = False
    with pytest.raises(DemoFailed, match=r"^618 s after the first order: check-back resolved no transaction to COMMIT"):
        play(machine)


def test_unsettled_transactions_are_counted() -> None:
    machine = Machine()
    machine.undelivered = 10
    proof = play(machine)
    assert "10 more committed orders than effects" in proof.failure
    assert not proof.ok and proof.reasons() == [proof.failure]
