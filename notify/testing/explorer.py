"""The crash explorer: runs a service once for each step that it takes, kills it there, and judges what is left.

    def shop(process: Process) -> None:              # what each process of the service does
        producer = TransactionProducer(process.url, group="orders", engine=process.engine)
        ...
        process.run(consumer)
        process.act(place_order, producer, "book")   # only the first process does this

    explored = explore(shop, causes="SELECT item FROM orders", effects="SELECT item FROM points")
    assert not explored.findings, explored

A run without a fault tells the steps. Then each step has a run of its own, in which the process is killed there, and a
COMMIT also one in which the database refuses it, and one in which its answer gets lost. A killed process is followed by
a new one. The server's clock is moved until all checks are answered and all messages are settled.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from notify.errors import InvalidRequest, Timeout
from notify.protocol.limits import check_between, check_whole
from notify.runtime.extras import remedy
from notify.runtime.green import patched_by
from notify.server.running import Running
from notify.testing.crashes import Crashed
from notify.testing.explored_database import ExploredDatabase, Rows, given_database
from notify.testing.hooks import HOOKS
from notify.testing.server import InMemoryServer
from notify.testing.service_process import (
    OF_ANOTHER,
    Children,
    Explored,
    Kind,
    Observed,
    Process,
    Service,
    Threads,
)
from notify.testing.step import Fault, Step, faults_at

if TYPE_CHECKING:
    from notify.testing.explored_kafka import ExploredGroup, ExploredKafka

__all__ = ["Exploration", "Finding", "Process", "explore"]

MOST_STEPS = 200
RUN_SECONDS, KAFKA_RUN_SECONDS = 30.0, 120.0
"""How long a run may take; over Kafka a killed consumer keeps its partitions for some seconds."""
TRIES = 3
"""How often a run is tried again in which the step did not come: threads may take turns in another order."""
LOOK_SECONDS = 0.005
"""The pause between two looks at what is still to be done."""
IDLE_SECONDS = 0.1
"""After this time in which nothing happens, the clock is moved to when something is due."""
HELD_SECONDS = 5.0
"""After this time in which nothing happens to messages that a consumer holds, its leases expire; and checks that no
producer has answered are asked again. Slow machines and databases take longer than IDLE_SECONDS for an answer."""
LATE_SECONDS = 0.5
"""How long a step may come after everything is settled."""
ROWS_SECONDS = 5.0
"""How long rows of an outbox may wait for a relay after everything else is settled."""
KAFKA_SHARE = 0.5
"""As ROWS_SECONDS, for a relay to Kafka, which first has to fence the one before: this share of a run's seconds."""
KAFKA_LOOK_SECONDS = 0.1
"""The pause between two looks at what Kafka has."""
MOVE_SECONDS = 60.0
"""How far the clock is moved for what has no known time, such as the next attempt of a message."""
DEAD_SECONDS = 60.0
"""How far the clock is moved after a kill: leases expire, and checks are due."""
SHOWN = 10
"""How many findings, and how many rows of a finding, a report shows."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of the service, as one run shows it. `name`: the audit's class. `fault`: what happened in the run; None:
    nothing. `before`: the steps that led to it."""

    name: str
    detail: str
    fault: Fault | None = None
    before: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}; {self.fault or 'without any fault'}"


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of `explore`: what was tried and found. `str()` tells the shortest run with a finding, step by step.

    `steps`: the steps that were tried, in the order in which they came. `findings`: empty if the service is right.
    `runs`: the number of faults that were tried, each in a run. `missed`: those of them whose step did not come again.
    """

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    runs: int
    missed: tuple[Fault, ...] = ()

    @property
    def shortest(self) -> Finding | None:
        """The finding after the fewest steps."""
        return min(self.findings, key=lambda finding: len(finding.before), default=None)

    def __str__(self) -> str:
        tried = f"{self.runs} runs of {len(self.steps)} steps"
        if self.missed:
            tried += f", and {len(self.missed)} faults whose step did not come again: the act varies"
        shortest = self.shortest
        if shortest is None:
            return f"no findings in {tried}"
        lines = [f"{len(self.findings)} findings in {tried}. The shortest:", str(shortest)]
        lines += ["  the steps that led there:"] if shortest.before else []
        lines += [f"  {number}. {step}" for number, step in enumerate(shortest.before, 1)]
        others = [finding for finding in self.findings if finding is not shortest]
        lines += ["also:"] if others else []
        lines += [f"- {finding}" for finding in others[:SHOWN]]
        lines += [f"- and {len(others) - SHOWN} more"] if len(others) > SHOWN else []
        return "\n".join(lines)


def explore(
    service: Service,
    *,
    causes: Rows | None = None,
    effects: Rows | None = None,
    database: str | sa.URL | None = None,
    kafka: str | None = None,
    real: bool = False,
    most_steps: int = MOST_STEPS,
    seconds: float | None = None,
) -> Exploration:
    """Run a service once for each step of its act, kill it there, and judge what is left.

    `service(process)` starts what a process of the service consists of, and calls `process.act` with what the test is
    about. `causes`, `effects`: queries, or functions of a connection; each row of the causes has to be a row of the
    effects once, and no other row may be there. `database`: the SQLAlchemy URL of a database for this test alone, or
    `django:` and the alias of one of Django's, whose rows are deleted and written again for each run; None: a new file
    of SQLite for each run. `kafka`: the URL (`kafka://host:port`) of brokers in which the service's topics and groups
    are this test's alone. `real`: processes are forked and killed by SIGKILL; otherwise they are threads of this
    process. `most_steps` (1 to 10,000): an act with more is refused. `seconds` (1 to 3,600; None: 30, and 120 over
    Kafka): a run that takes longer ends.

    Raises InvalidRequest for an act without steps, with too many, or without causes, and for what cannot be explored,
    Timeout for an act that does not return, and what `service` raises where nothing was done to it.
    """
    check_whole("most_steps", most_steps, 1, 10_000)
    if seconds is None:
        seconds = RUN_SECONDS if kafka is None else KAFKA_RUN_SECONDS
    check_between("seconds", seconds, 1, 3600)
    if (causes is None) is not (effects is None):
        raise InvalidRequest("give both causes and effects: each cause has to have its effect once")
    if library := patched_by():
        raise InvalidRequest(
            f"{library} has put greenlets in the place of threads, which cannot be killed one by one: explore the "
            "service in a process without monkey patching"
        )
    _check_clock()
    given = given_database(database)
    with ExitStack() as stack:
        kind: Kind = Children(service, kafka or "") if real else Threads(service, kafka or "")
        stack.callback(kind.close)
        if not real:
            stack.enter_context(HOOKS.installed(explorer=threading.get_ident()))
        server = stack.enter_context(InMemoryServer())
        server.freeze()
        explored_database = ExploredDatabase(given)
        stack.callback(explored_database.close)
        explored_kafka: ExploredKafka | None = None
        if kafka is not None:
            explored_kafka = _kafka_of(kafka)
            stack.callback(explored_kafka.close)
        return _Explorer(
            server, kind, explored_database, explored_kafka, causes, effects, most_steps, seconds
        ).explore()


def _kafka_of(url: str) -> ExploredKafka:
    try:
        from notify.testing.explored_kafka import ExploredKafka
    except ImportError as error:
        raise InvalidRequest(f"kafka= cannot be explored: {remedy(error) or error}") from error
    return ExploredKafka(url)


@dataclass(frozen=True, slots=True)
class _Left:
    """The work that is still to be done at the server."""

    halves: int
    asked: int
    """How many of them producers are asked about, and have not answered."""
    unsettled: int
    leased: int
    """How many of the unsettled messages consumers hold."""
    dead_letters: int
    due_seconds: float | None
    """How far the clock has to be moved until something else is due; None: nothing is, or is already."""

    @property
    def is_nothing(self) -> bool:
        return not self.halves and not self.unsettled


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a run."""

    steps: tuple[Step, ...]
    """The steps of the first process."""
    is_met: bool
    has_acted: bool
    error: object
    """The exception that the act or the service's function raised, or its text."""
    left: _Left
    waiting_rows: int
    """How many rows of the outbox wait for a relay."""
    messages: Counter[str]
    causes: Counter[Any]
    effects: Counter[Any]
    committed: set[str]


class _Explorer:
    def __init__(
        self,
        server: InMemoryServer,
        kind: Kind,
        database: ExploredDatabase,
        kafka: ExploredKafka | None,
        causes: Rows | None,
        effects: Rows | None,
        most_steps: int,
        seconds: float,
    ) -> None:
        self._server = server
        self._kind = kind
        self._database = database
        self._kafka = kafka
        self._groups: set[ExploredGroup] = set()
        """The groups of consumers over Kafka, as they come to be known, and the topics of messages that have rows."""
        self._topics: set[str] = set()
        self._causes, self._effects = causes, effects
        self._most_steps = most_steps
        self._seconds = seconds

    def explore(self) -> Exploration:
        self._prepare()
        plain = self._run(None)
        steps = list(plain.steps)
        found = [Finding(*wrong) for wrong in self._judge(plain, plain)]
        if found:
            return Exploration(tuple(steps), tuple(found), 0)
        if not steps:
            raise InvalidRequest(
                "the act took no step: call what the test is about by process.act(…), and start no process for it"
            )
        if self._causes is not None and not plain.causes:
            raise InvalidRequest("the query of the causes returned no row after the act: nothing can be judged")
        known = set(steps)
        missed: list[Fault] = []
        runs = 0
        for step in steps:  # grows by the steps that come only with another order of the threads
            if len(steps) > self._most_steps:
                raise InvalidRequest(
                    f"the act takes {len(steps)} steps, and most_steps is {self._most_steps}: let it do less, or allow "
                    "more"
                )
            for fault in faults_at(step):
                runs += 1
                for _ in range(TRIES):
                    ended = self._run(fault)
                    before = ended.steps[: ended.steps.index(step)] if ended.is_met else ended.steps
                    steps += [new for new in before if new not in known]
                    known.update(before)
                    if ended.is_met:
                        break
                else:
                    if not ended.steps:
                        raise InvalidRequest(
                            "the act took no step when it was called again: something that outlives a process, such as "
                            "a global variable or the value of a fixture, has changed it; give each process its own"
                        ) from (ended.error if isinstance(ended.error, BaseException) else None)
                    missed.append(fault)
                found += [Finding(*wrong, fault, before) for wrong in self._judge(ended, plain)]
        return Exploration(tuple(steps), tuple(found), runs, tuple(missed))

    def _prepare(self) -> None:
        """Let the service make its tables, and remember what the database then holds."""
        entrance = self._server.entrance()
        process = self._kind.start(entrance, self._database.url, None, True)
        try:
            self._await_start(process, time.monotonic() + self._seconds)
            self._groups.update(process.observed.groups)
        finally:
            process.kill()
            entrance.close()
        self._database.remember()

    def _await_start(self, process: Explored, deadline: float) -> None:
        """Wait until the service's function has returned in a process that does not act."""
        observed = process.observed
        while not observed.has_returned:
            if observed.is_dead or time.monotonic() > deadline:
                _check_clock()
                raise Timeout("a process of the service did not start in time: its function has to return")
            time.sleep(LOOK_SECONDS)  # the pause between two looks
        _raise(observed.error)

    @contextmanager
    def _process(self, fault: Fault | None, is_restarted: bool) -> Iterator[Explored]:
        entrance = self._server.entrance()
        process = self._kind.start(entrance, self._database.url, fault, is_restarted)
        try:
            yield process
        finally:
            process.kill()
            entrance.close()

    def _run(self, fault: Fault | None) -> _Ended:
        self._server.forget()
        if self._kafka is not None:
            self._kind.rest()
            self._kafka.begin(self._groups, self._topics)
        self._database.restore()
        deadline = time.monotonic() + self._seconds
        with self._process(fault, False) as process:
            left = self._settled(process, fault, deadline, IDLE_SECONDS if fault is None else 0.0)
            observed = process.observed
            is_dead = observed.is_dead
            if not is_dead and not observed.has_returned:
                _check_clock()
                raise Timeout(f"the act did not return within {self._seconds:g} s; {fault or 'without any fault'}")
            if not is_dead and (fault is None or observed.has_acted):
                _raise(observed.error)
        if is_dead:
            self._server.advance(DEAD_SECONDS)
            with self._process(None, True) as restarted:
                self._await_start(restarted, deadline)
                left = self._settled(restarted, None, deadline)
        committed = self._database.committed()
        messages = Counter(message.id for message in self._server.messages())
        if self._kafka is not None:
            self._topics.update(self._database.topics())
            if self._database.has_delayed():
                raise InvalidRequest(
                    "the act sends a delayed message: over Kafka a delay passes in real time, which the explorer does "
                    "not wait for; let it send without delay, or explore it without kafka="
                )
            messages.update({id: n for id, n in self._kafka.messages(self._topics).items() if id in committed})
            dead_letters = self._kafka.dead_letters(self._groups)
            unsettled = left.unsettled + self._kafka.unsettled(self._groups)
            left = replace(left, unsettled=unsettled, dead_letters=dead_letters)
        return _Ended(
            tuple(observed.steps),
            fault is None or fault.step in observed.steps,
            observed.has_acted,
            observed.error,
            left,
            self._database.waiting(),
            messages,
            Counter() if self._causes is None else self._database.count(self._causes),
            Counter() if self._effects is None else self._database.count(self._effects),
            committed,
        )

    def _settled(self, process: Explored, fault: Fault | None, deadline: float, last_seconds: float = 0.0) -> _Left:
        """Wait until nothing is left to be done, and move the clock where something waits for it. Ends early if the
        process dies, and at the deadline. `last_seconds`: how long the last step may take to come after that."""
        observed = process.observed
        moved_at = time.monotonic()
        before: _Left | None = None
        while True:
            left = self._server.inside(_left)
            now = time.monotonic()
            if left != before:
                before, moved_at = left, now
            quiet = now - max(moved_at, observed.moved_at)
            if observed.is_dead or now > deadline:
                return left
            if observed.has_returned and left.is_nothing:
                is_awaited = fault is not None and fault.step not in observed.steps
                is_over = quiet >= (LATE_SECONDS if is_awaited else last_seconds)
                if is_over and self._is_moved(observed, quiet):
                    left = self._server.inside(_left)  # a relay may have sent a message meanwhile, and marked its row
                    if left.is_nothing:
                        return left
            elif observed.has_returned and quiet > (HELD_SECONDS if left.leased or left.asked else IDLE_SECONDS):
                self._server.advance(left.due_seconds or MOVE_SECONDS)
                moved_at = time.monotonic()
            time.sleep(LOOK_SECONDS)  # the pause between two looks

    def _is_moved(self, observed: Observed, quiet: float) -> bool:
        """Whether no row waits for a relay, and no record of Kafka's for a consumer; or none does anything about it."""
        if self._database.waiting():
            return quiet >= (ROWS_SECONDS if self._kafka is None else KAFKA_SHARE * self._seconds)
        if self._kafka is None:
            return True
        self._groups.update(observed.groups)
        if not self._kafka.unsettled(self._groups):
            return True
        time.sleep(KAFKA_LOOK_SECONDS)  # the pause between two looks
        return False

    # --- judging ----------------------------------------------------------------------------------------------

    def _judge(self, ended: _Ended, plain: _Ended) -> Iterator[tuple[str, str]]:
        """The audit's classes of what is wrong, each with a sentence. `plain`: the run without a fault."""
        left = ended.left
        if left.halves:
            yield "IN_DOUBT", f"{left.halves} half messages have no outcome"
        if left.unsettled:
            yield "UNDELIVERED", f"{left.unsettled} messages are not settled"
        if ended.waiting_rows:
            yield "UNDELIVERED", f"{ended.waiting_rows} rows of the outbox wait for a relay: process.relay() runs one"
        if left.dead_letters > plain.left.dead_letters:
            yield "DEAD", f"{left.dead_letters} dead letters"
        if not ended.waiting_rows and (lost := ended.committed - ended.messages.keys()):
            yield "LOST", f"the database committed {len(lost)} messages that are in no queue"
        if ended.has_acted and ended.causes.total() < plain.causes.total():
            yield (
                "LOST",
                f"the act returned as if it had succeeded, and {plain.causes.total() - ended.causes.total()} of its "
                "causes are not there: an error was swallowed",
            )
        missing = ended.causes - ended.effects
        surplus = Counter({row: count for row, count in (ended.effects - ended.causes).items() if row in ended.causes})
        ghosts = ended.effects - ended.causes - surplus
        if missing and ended.messages.total() < plain.messages.total():
            yield "LOST", f"causes without an effect, and without a message: {_shown(missing)}"
        elif missing and left.dead_letters:
            yield "DEAD", f"causes without an effect, and {left.dead_letters} dead letters: {_shown(missing)}"
        elif missing and not left.unsettled:
            yield "ACKED_NO_EFFECT", f"causes without an effect, although their messages are settled: {_shown(missing)}"
        if surplus:
            yield "DUP_EFFECT", f"effects that happened more than once: {_shown(surplus)}"
        if ghosts:
            yield "GHOST", f"effects without a cause: {_shown(ghosts)}"


def _shown(rows: Counter[Any]) -> str:
    shown = ", ".join(f"{row!r}" + (f" ({count} times)" if count > 1 else "") for row, count in rows.most_common(SHOWN))
    return shown + (", …" if len(rows) > SHOWN else "")


async def _left(running: Running) -> _Left:
    core = running.core
    halves = await core.store.undecided(None, None, None, 1_000_000)
    checking = [await core.store.checking(half.id) for half in halves]
    summary = await running.queues.groups.summary() or {}
    due_us = [half.next_check_us for half in halves]
    if (delayed_us := core.queues.next_due_us()) is not None:
        due_us.append(delayed_us)
    until_us = min(due_us, default=0) - core.clock()
    return _Left(
        sum(len(half.messages) for half in halves),
        sum(check is not None and check.token != 0 for check in checking),
        summary.get("lag", 0) + summary.get("delayed", 0),
        summary.get("leased", 0),
        summary.get("dead_letters", 0),
        until_us / 1_000_000 if until_us > 0 else None,
    )


def _check_clock() -> None:
    """Raises InvalidRequest where time does not pass, so that no wait ends, or all end at once."""
    before = time.monotonic()
    time.sleep(LOOK_SECONDS)  # time passes meanwhile
    if time.monotonic() == before:
        raise InvalidRequest(
            "time.monotonic() does not advance, so that no wait ends: freeze the time with freezegun's "
            'ignore=["notify", "asyncio"], or use time-machine, which lets that clock run'
        )


def _raise(error: object) -> None:
    """Raise what a living process has raised."""
    if isinstance(error, Crashed):
        raise InvalidRequest(OF_ANOTHER) from error
    if isinstance(error, BaseException):
        raise error
    if error is not None:
        raise RuntimeError(f"the service failed in its process:\n{error}")
