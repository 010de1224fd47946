"""The demo's conductor: it kills the shop's processes and servers, each only after it has made progress.

A slow machine takes seconds to start a process, and a fast one milliseconds. Therefore the clock starts with the first
order, a process is killed only after it has committed orders or effects since its start, and the run ends when each
goal is met. Every wait has a bound; when it is reached, the demo fails with a line that says what was missing.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notify.cli.demo_shop.books import Books, Counts
from notify.cli.demo_shop.children import Children
from notify.cli.demo_shop.end import End, Lost
from notify.cli.demo_shop.proof import DemoFailed, Proof
from notify.cli.demo_shop.topology import Topology

SECONDS = 18.0
"""By default processes are killed for at least this time after the first order."""
ORDERS = 500
"""The number of orders to commit; a shorter run needs fewer."""
RESOLVED = ("COMMITTED", "ROLLED_BACK")
"""Check-back must resolve at least one transaction to each of these states."""

FIRST_ORDER_SECONDS = 180.0
PROGRESS_SECONDS = 180.0
"""The longest time from a process's start to its first order or effect."""
GOALS_SECONDS = 600.0
"""The longest time from the end of the run's `seconds` until the goals are met; the killing continues until then."""
SETTLE_SECONDS = 300.0
LOOK_SECONDS = 0.2

LIFE_PROGRESS = (20, 60)
"""The smallest and the largest number of orders or effects before a life may end."""
LIFE_SECONDS = {"producer": (1.2, 2.6), "consumer": (1.8, 3.9)}
"""The shortest and the longest time from the first order or effect until a life may end."""
ANY_MOMENT = ""
PRODUCER_ENDS = (("after_local_commit", ANY_MOMENT, "after_half", ANY_MOMENT),
                 ("after_half", ANY_MOMENT, "after_local_commit", ANY_MOMENT))  # fmt: skip
"""The ends of a producer's lives, in turn; the second producer has the reverse order."""


class Clock:
    """The time, which tests replace."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


WATCHED_AFTER_SECONDS = 1.0
"""The smallest age of a half that is followed; most younger halves are about to be committed."""

_DECIDED_BY = {"COMMITTED": "COMMIT", "ROLLED_BACK": "ROLLBACK"}


class Doubts:
    """The transactions that are in doubt now. Those that check-back resolves are added to the proof.

    A transaction counts if it is decided and the servers' record of its checks has the deciding answer. If a late
    outcome of the producer decided it, there is no such answer; if a server was killed, its record is lost.
    """

    def __init__(self, topology: Topology, proof: Proof) -> None:
        self._topology = topology
        self._proof = proof
        self._open: dict[str, Lost | None] = {}

    def add(self, lost: Lost) -> None:
        """Add a transaction whose producer died before it sent the outcome."""
        self._proof.lost.append(lost)
        self._open[lost.transaction] = lost

    def look(self) -> None:
        """List the undecided transactions, and look up the followed ones that are no longer undecided."""
        rows = self._topology.undecided()
        self._proof.undecided = len(rows)
        for row in rows:
            if row["age"] > WATCHED_AFTER_SECONDS:
                self._open.setdefault(row["id"], None)
        for transaction_id in self._open.keys() - {row["id"] for row in rows}:
            record = self._topology.transaction(transaction_id)
            if record["state"] in _DECIDED_BY:
                self._add_decided(record, self._open.pop(transaction_id))

    def _add_decided(self, record: dict[str, Any], lost: Lost | None) -> None:
        state = record["state"]
        if lost is not None:
            lost.state, lost.checks = state, record["checks"]
        if any(check["what"] == _DECIDED_BY[state] for check in record["checks"]):
            self._proof.in_doubt[state] = self._proof.in_doubt.get(state, 0) + 1


@dataclass(slots=True)
class _Life:
    """One process from its start to its end."""

    process: str
    end: End
    waited_for_since: float
    progress_at: float | None = None
    """When the conductor saw the process's first order or effect."""


@dataclass(slots=True)
class _Part:
    """A part of the topology that will be killed once."""

    name: str
    due_at: float


class Conductor:
    """Runs the children on a topology, and kills processes of both."""

    def __init__(
        self,
        children: Children,
        topology: Topology,
        books: Books,
        proof: Proof,
        report: Callable[[Proof, str], None],
        chance: random.Random,
        seconds: float = SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """`report` is called a few times a second with the proof so far. `seconds`: how long to kill at least."""
        self._children = children
        self._topology = topology
        self._books = books
        self._proof = proof
        self._report = report
        self._chance = chance
        self._seconds = seconds
        self._orders = min(ORDERS, round(ORDERS * seconds / SECONDS))
        self._clock = clock or Clock()
        self._doubts = Doubts(topology, proof)
        self._counts = Counts({}, {})
        self._lives: dict[str, _Life] = {}
        self._ends = self._plan_ends()
        self._parts: list[_Part] = []
        self._when_parts_were_up = self._counts
        self._killing = True
        proof.killed |= dict.fromkeys(topology.parts(), 0)

    def run(self) -> None:
        """Wait for the first order, kill until the goals are met, then wait until all orders have their effects.

        Raises DemoFailed, and the errors of a server or database that cannot be reached.
        """
        for name in self._children.names():
            self._start(name)
        self._wait_for_the_first_order()
        self._kill_until_the_goals_are_met()
        self._settle()

    # --- steps ------------------------------------------------------------------------------------------------

    def _wait_for_the_first_order(self) -> None:
        until = self._clock.now() + FIRST_ORDER_SECONDS
        while True:
            self._look("waiting for the first order")
            if self._counts.committed:
                return
            if self._clock.now() > until:
                lines = [f"; {line}" for line in map(self._last_words, self._children.names()) if line]
                raise DemoFailed(f"no order was committed within {FIRST_ORDER_SECONDS:g} s" + "".join(lines))
            self._clock.sleep(LOOK_SECONDS)

    def _kill_until_the_goals_are_met(self) -> None:
        """Kill producers and consumers repeatedly, and each part of the topology once."""
        self._restart_bounds()
        began = self._clock.now()
        until = began + self._seconds
        parts = self._topology.parts()
        for number, name in enumerate(parts):
            moment = (number + self._chance.uniform(0.1, 0.7)) / len(parts)
            self._parts.append(_Part(name, began + moment * self._seconds))
        while True:
            is_over = self._clock.now() >= until
            unmet = self._unmet()
            if is_over and not unmet:
                return
            if self._clock.now() > until + GOALS_SECONDS:
                waited = self._clock.now() - began
                raise DemoFailed(f"{waited:.0f} s after the first order: {', '.join(unmet)}")
            self._kill_processes_with_progress()
            self._kill_a_part()
            self._look(
                "killing processes until each goal is met" if is_over else "placing orders while processes are killed"
            )
            self._clock.sleep(LOOK_SECONDS)

    def _unmet(self) -> list[str]:
        """A text for each goal that is not met."""
        proof = self._proof
        unmet = []
        if proof.committed < self._orders:
            unmet.append(f"{proof.committed:,} of {self._orders:,} orders are committed")
        unmet += [f"no {name} was killed" for name, times in proof.killed.items() if not times]
        unmet += [f"no producer died {point}" for point, times in proof.killed_at.items() if not times]
        unmet += [f"check-back resolved no transaction to {state}" for state in RESOLVED if state not in proof.in_doubt]
        return unmet

    def _settle(self) -> None:
        """Stop ordering and killing, and wait until every half is decided and every committed order has its effect."""
        self._killing = False
        self._children.stop_orders()
        until = self._clock.now() + SETTLE_SECONDS
        while True:
            # The order matters: no half follows the last order, and no order commits after the last decision.
            stopped = self._children.orders_have_stopped()
            self._look("waiting for check-back and delivery to finish")
            missing = self._counts.committed - self._counts.taken_effect
            lag = self._topology.lag(max(0, missing))
            if stopped and not self._proof.undecided and missing <= 0 and not lag:
                return
            if self._clock.now() > until:
                self._proof.failure = (
                    f"not settled within {SETTLE_SECONDS:g} s: {self._proof.undecided:,} transactions undecided, "
                    f"{lag:,} messages before the group, {missing:,} more committed orders than effects"
                    + ("" if stopped else ", producers still at work")
                )
                return
            self._clock.sleep(LOOK_SECONDS)

    def _look(self, step: str) -> None:
        """Restart ended processes, and update transactions in doubt, counts and the report."""
        self._restart_ended()
        self._doubts.look()
        self._counts = self._books.counts()
        self._proof.committed, self._proof.effects = self._counts.committed, self._counts.taken_effect
        self._report(self._proof, step)

    # --- lives and deaths -------------------------------------------------------------------------------------

    def _plan_ends(self) -> dict[str, itertools.cycle[str]]:
        """The ends of each process's lives, in turn."""
        producers = itertools.cycle(PRODUCER_ENDS)
        return {
            name: itertools.cycle(next(producers) if _kind(name) == "producer" else (ANY_MOMENT,))
            for name in self._children.names()
        }

    def _start(self, name: str) -> None:
        """Start the next life of a process."""
        seconds = self._chance.uniform(*LIFE_SECONDS[_kind(name)])
        end = End(next(self._ends[name]), self._chance.randint(*LIFE_PROGRESS), seconds)
        process = self._children.start(name, end if end.point and self._killing else None)
        self._lives[name] = _Life(process, end, self._clock.now())

    def _restart_ended(self) -> None:
        """Restart processes that killed themselves as planned. Raises DemoFailed if another process has ended."""
        # A process writes down its lost transaction before it kills itself, so read the exit codes first.
        ended = {name: code for name in self._lives if (code := self._children.exit_code(name)) is not None}
        seen = {lost.transaction for lost in self._proof.lost}
        for lost in self._children.lost():
            if lost.transaction not in seen:
                self._doubts.add(lost)
        points = {lost.process: lost.point for lost in self._proof.lost}
        for name, code in ended.items():
            process = self._lives[name].process
            if code != -signal.SIGKILL or process not in points:
                raise DemoFailed(_with(f"{process} ended by itself with exit code {code}", self._last_words(name)))
            self._proof.killed_at[points[process]] += 1
            self._start(name)
        for part, code in self._topology.ended().items():
            words = self._topology.last_words().get(part, [])[-1:]
            raise DemoFailed(_with(f"the {part} ended by itself with exit code {code}", "".join(words)))

    def _kill_processes_with_progress(self) -> None:
        """Kill each process whose life is over. Raises DemoFailed if a process has made no progress for too long."""
        now = self._clock.now()
        for name, life in list(self._lives.items()):
            progress = self._counts.of(life.process)
            if not progress:
                if now - life.waited_for_since > PROGRESS_SECONDS:
                    failure = "committed no order" if _kind(name) == "producer" else "had no effect"
                    line = f"{life.process} {failure} within {PROGRESS_SECONDS:g} s"
                    raise DemoFailed(_with(line, self._last_words(name)))
                continue
            if life.progress_at is None:
                life.progress_at = now
            lived = now - life.progress_at
            if life.end.point == ANY_MOMENT and progress >= life.end.progress and lived >= life.end.seconds:
                self._children.kill(name)
                self._proof.killed[_kind(name)] += 1
                self._start(name)

    def _kill_a_part(self) -> None:
        """Kill the next part that is due, if there were orders and effects since the previous part was restarted."""
        if not self._parts or self._clock.now() < self._parts[0].due_at:
            return
        before = self._when_parts_were_up
        if self._counts.committed == before.committed or self._counts.taken_effect == before.taken_effect:
            return
        part = self._parts.pop(0).name
        self._report(self._proof, f"killing and restarting the {part}")
        self._topology.kill(part)
        self._proof.killed[part] += 1
        self._when_parts_were_up = self._books.counts()
        self._restart_bounds()

    def _restart_bounds(self) -> None:
        """Restart the bound on the progress of each process, because no process could make progress until now."""
        for life in self._lives.values():
            life.waited_for_since = self._clock.now()

    def _last_words(self, name: str) -> str:
        return "".join(self._children.last_words()[name][-1:])


def _kind(name: str) -> str:
    """The kind of a process: producer or consumer."""
    return name.partition(" ")[0]


def _with(line: str, last_words: str) -> str:
    return f"{line}: {last_words}" if last_words else f"{line}, and wrote nothing"
