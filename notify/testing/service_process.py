"""The processes of a service that the crash explorer runs and kills: threads of this process, or real ones.

A killed thread cannot be stopped, but it can do no harm any more: its way to the server is closed, its connections to
databases are cut, and its next step raises Crashed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import inspect
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, Pipe
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import sqlalchemy as sa

from notify.client.consumer.consumer import AsyncConsumer, Consumer
from notify.client.producer import outgoing as producers
from notify.client.producer.async_producer import AsyncTransactionProducer
from notify.client.producer.outgoing import LoopOutgoing, ThreadOutgoing
from notify.client.producer.producer import ThreadProducer
from notify.client.producer.running import Running
from notify.client.threads.loop import LoopThread
from notify.errors import InvalidRequest, Unavailable
from notify.testing.crashes import Crashed
from notify.testing.explored_database import engine_of
from notify.testing.hooks import HOOKS
from notify.testing.server import Entrance
from notify.testing.step import Fault, Place, Step, place_of_caller

if TYPE_CHECKING:
    from notify.testing.explored_kafka import ExploredGroup

T = TypeVar("T")
START_SECONDS = 30.0
"""How long a consumer may take to subscribe, and a real process to start."""
END_SECONDS = 10.0
"""How long the parts of dead processes may take to end."""
OF_ANOTHER = (
    "this engine belongs to a process that was killed: make engines, producers and consumers in the function that each "
    "process calls (process.engine, process.load), not once for all of them, as a fixture does"
)
Event = (
    tuple[Literal["step"], Step] | tuple[Literal["group"], "ExploredGroup"] | tuple[Literal["returned"], bool, object]
)


class Process:
    """One process of the service under test: what the tested function gets each time that it is called.

    `url`: the address of the server, for this process's producers and consumers. `kafka`: the URL of the brokers; empty
    without them. `database`: the SQLAlchemy URL of the database, or `django:` and an alias. `is_restarted`: whether
    this process follows one that was killed.
    """

    def __init__(self, run: ServiceRun, database: str, is_restarted: bool) -> None:
        self.url = run.url
        self.kafka = run.kafka
        self.database = database
        self.is_restarted = is_restarted
        self._run = run
        self._engine: sa.Engine | None = None

    @property
    def engine(self) -> sa.Engine:
        """A SQLAlchemy engine of this process for the database; on SQLite with `use_explicit_begin`."""
        if self._engine is None:
            self._engine = engine_of(self.database)
        return self._engine

    def load(self, module: str) -> Any:
        """Import a module of the service again, as a new process does: its engines and producers must not be those of
        the killed process. Returns the module. Django's models, which can be imported only once, stay as they are."""
        package = module.partition(".")[0]
        if package not in self._run.packages:
            self._run.packages.add(package)
            kept = HOOKS.kept_modules
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                if name not in kept:
                    del sys.modules[name]
        return importlib.import_module(module)

    def run(self, *parts: Any) -> None:
        """Run consumers until this process ends, and have producers answer checks.

        Returns once the consumers have subscribed. Raises InvalidRequest for a part whose engine belongs to a process
        that was killed, Unavailable for a consumer that does not subscribe, and what its `run` raises.
        """
        for part in parts:
            self._run.run(part)

    def relay(self, *, schema: str | None = None) -> None:
        """Run a relay of this process's database until the process ends, for a producer in mode `outbox`. It moves to
        Kafka, if the exploration has brokers, otherwise to the server. What it sends and marks are steps. `schema`: the
        schema of the outbox."""
        self._run.relay(self.engine, schema)

    def act(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T | None:
        """Call the function that the test is about, whose every step is tried; None in a restarted process, where it is
        not called. It should raise an exception when the service refuses: if it returns, its changes must be there.
        A coroutine function runs on this process's event loop."""
        if self.is_restarted:
            return None
        with self._run.acting():
            result: Any = function(*arguments, **named)
            if inspect.iscoroutine(result):
                result = self._run.loop().run(result)
        return result  # type: ignore[no-any-return]


Service = Callable[[Process], object]


class ServiceRun:
    """The run of a process, in the process (of the operating system) that runs it."""

    def __init__(
        self, url: str, kafka: str, fault: Fault | None, die: Callable[[], None], tell: Callable[[Event], None]
    ) -> None:
        """`die` is called before Crashed is raised; `tell` gets each event."""
        self.url = url
        self.kafka = kafka
        self.relay_place: Place | None = None
        self._fault = fault
        self._die = die
        self._tell = tell
        self._is_acting = False
        self.is_dead = False
        self._lock = threading.Lock()
        self._times: Counter[tuple[str, str, int]] = Counter()
        self._loop: LoopThread | None = None
        self._parts: list[Any] = []
        self._threads: list[threading.Thread] = []
        """The threads of consumers."""
        self._outgoings: dict[int, ThreadOutgoing | LoopOutgoing] = {}
        self._has_acted = False
        self._process: Process | None = None
        """Kept until the run is buried: its engine's connections are open."""
        self.packages: set[str] = set()
        """The packages that this run has imported again."""

    # --- steps ------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        if self.is_dead:
            raise Crashed("this process was killed")

    def meet(self, what: str, file: str, line: int) -> bool:
        self.check_alive()
        if not self._is_acting:
            return False
        with self._lock:
            self.check_alive()
            key = what, file, line
            self._times[key] += 1
            step = Step(*key, self._times[key])
            self._tell(("step", step))
            fault = self._fault
            if fault is None or fault.step != step:
                return False
            if not fault.is_kill:
                return True
            self.is_dead = True
        self._die()
        raise Crashed(str(fault))

    def started(self, outgoing: ThreadOutgoing | LoopOutgoing) -> None:
        if id(outgoing) not in self._outgoings:
            self._outgoings[id(outgoing)] = outgoing
            self._check_engine(outgoing._plan.engine)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """The act: from its beginning on, each step counts."""
        self._is_acting = True
        yield
        self._has_acted = not self.is_dead  # a rollback's error may have taken the place of Crashed

    # --- parts ------------------------------------------------------------------------------------------------

    def main(self, service: Service, database: str, is_restarted: bool) -> None:
        """Call the service's function, and tell how it ended."""
        HOOKS.begin(self)
        self._process = process = Process(self, database, is_restarted)
        error: BaseException | None = None
        try:
            result = service(process)
            if inspect.iscoroutine(result):
                result.close()
                raise InvalidRequest(
                    "the service is a plain function, without async: process.act also takes coroutine functions"
                )
        except BaseException as raised:
            error = raised
        self._tell(("returned", self._has_acted, error))

    def loop(self) -> LoopThread:
        """The event loop of this process's coroutines."""
        if self._loop is None:
            self._loop = LoopThread("notify-explored")
        return self._loop

    def run(self, part: Any) -> None:
        if isinstance(part, Consumer | AsyncConsumer):
            self._check_engine(getattr(part._inbox, "engine", None))
            self._parts.append(part)
            self._run_consumer(part)
        elif isinstance(part, AsyncTransactionProducer | ThreadProducer):
            self._check_engine(part._plan.engine)
            if part.url != self.url and part._plan.mode != "outbox":
                raise InvalidRequest(f"give the producer the address process.url; it has {part.url}")
            if isinstance(part, ThreadProducer):
                part.outgoing.start()
            else:
                self.loop().run(part.start(), START_SECONDS)
        else:
            raise InvalidRequest(f"run takes consumers and producers, not a {type(part).__name__}")

    def relay(self, engine: sa.Engine, schema: str | None) -> None:
        from notify.testing.relay_steps import relay  # it needs the movers, which few services run

        self._check_engine(engine)
        self.relay_place = place_of_caller()
        moving = asyncio.run_coroutine_threadsafe(relay(self, engine, self.kafka or self.url, schema), self.loop().loop)
        moving.add_done_callback(self._relay_has_ended)

    def _relay_has_ended(self, moving: concurrent.futures.Future[None]) -> None:
        error = None if moving.cancelled() else moving.exception()
        if error is not None and not self.is_dead:
            self._tell(("returned", False, error))

    def _check_engine(self, engine: Any) -> None:
        if not HOOKS.owns(self, engine):
            raise InvalidRequest(OF_ANOTHER)

    def _run_consumer(self, consumer: Consumer | AsyncConsumer) -> None:
        if self.kafka and consumer.url == self.kafka:
            from notify.testing import kafka_steps
            from notify.testing.explored_kafka import group_of

            kafka_steps.look()
            HOOKS.claim(consumer, self)
            self._tell(("group", group_of(consumer)))
        elif consumer.url != self.url:
            raise InvalidRequest(
                f"give the consumer the address process.url, or process.kafka of an exploration with brokers; it has "
                f"{consumer.url}"
            )
        subscribed = threading.Event()
        errors: list[BaseException] = []
        consumer._announce = lambda text: subscribed.set()  # type: ignore[assignment]

        def run() -> None:
            try:
                if isinstance(consumer, Consumer):
                    consumer.run(signals=False)
                else:
                    self.loop().run(consumer.run())
            except BaseException as error:
                errors.append(error)
            subscribed.set()

        self._threads.append(threading.Thread(target=run, name="notify-explored-consumer", daemon=True))
        self._threads[-1].start()
        if not subscribed.wait(START_SECONDS):
            raise Unavailable(f"the consumer of {consumer.group} did not subscribe within {START_SECONDS:g} s")
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """End the parts of this dead run, which cannot reach the server or a database any more."""
        for part in self._parts:
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                _cut(part)
        if self.kafka:
            for thread in self._threads:
                thread.join(END_SECONDS)  # until it has left its group, the next process gets no partitions
        for outgoing in self._outgoings.values():
            if isinstance(outgoing, ThreadOutgoing):
                _abandon(outgoing)
                continue
            outgoing.is_closed = True
            if outgoing._forgotten is not None:
                outgoing._forgotten.detach()
            if self._loop is not None and outgoing._loop is self._loop.loop and outgoing._running is not None:
                with contextlib.suppress(TimeoutError):
                    self._loop.run(_cancelled(outgoing._running), END_SECONDS)
        if self._loop is not None:
            self._loop.close()
        HOOKS.close(self)


def _cut(consumer: AsyncConsumer | Consumer) -> None:
    """Have a consumer end without waiting for its handlers."""
    if isinstance(consumer, Consumer):
        consumer._cut(signal.SIGTERM)
    elif consumer._loop is not None and consumer._consuming is not None:
        consumer._is_cut = True
        consumer._loop.call_soon_threadsafe(consumer._consuming.cancel)


def _abandon(outgoing: ThreadOutgoing) -> None:
    outgoing.is_closed = True
    producers._open.discard(outgoing)
    if outgoing._started is None:
        return
    thread, running = outgoing._started
    if outgoing._blocking is not None:
        outgoing._blocking.abandon()
    with contextlib.suppress(TimeoutError):
        thread.run(_cancelled(running), END_SECONDS)
    thread.close()


async def _cancelled(running: Running) -> None:
    for task in running._tasks:
        task.cancel()
    await running.client.http.aclose()


# --- what the explorer sees of a run --------------------------------------------------------------------------


@dataclass
class Observed:
    """The explorer's knowledge of a run."""

    steps: list[Step] = field(default_factory=list)
    groups: list[ExploredGroup] = field(default_factory=list)
    """The groups of consumers over Kafka."""
    has_returned: bool = False
    """Whether the service's function has returned, or raised."""
    has_acted: bool = False
    """Whether the act has returned without an exception."""
    error: object = None
    """The exception of the service's function, or its text."""
    is_dead: bool = False
    moved_at: float = field(default_factory=time.monotonic)

    def hear(self, event: Event) -> None:
        self.moved_at = time.monotonic()
        if event[0] == "step":
            self.steps.append(event[1])
        elif event[0] == "group":
            self.groups.append(event[1])
        else:
            self.has_acted, self.error = event[1], self.error or event[2]
            self.has_returned = True  # the last one: the explorer then reads the others


class Explored(Protocol):
    """A process that the explorer has started."""

    observed: Observed

    def kill(self) -> None:
        """Kill it, unless it is dead."""


class Kind(Protocol):
    """How the explorer starts processes."""

    def start(self, entrance: Entrance, database: str, fault: Fault | None, is_restarted: bool) -> Explored:
        """Start a process. `fault`: what happens in it."""

    def rest(self) -> None:
        """Wait until what is left of the dead ones has ended."""

    def close(self) -> None:
        """End what is left of all of them."""


class _Thread:
    """A process that is a thread of this process, with the threads of its consumers and producers."""

    def __init__(self, kind: Threads, entrance: Entrance, database: str, fault: Fault | None, is_restarted: bool):
        self.observed = Observed()
        self._kind = kind
        self._entrance = entrance
        self.run = ServiceRun(entrance.url, kind.kafka, fault, self._die, self.observed.hear)
        main = self.run.main
        threading.Thread(
            target=main, args=(kind.service, database, is_restarted), name="notify-explored", daemon=True
        ).start()

    def _die(self) -> None:
        self.run.is_dead = True
        self._entrance.close()
        HOOKS.cut(self.run)
        self.observed.is_dead = True

    def kill(self) -> None:
        if not self.run.is_dead:
            self._die()
        self._kind.bury(self.run)


_LOGGERS = ("notify.client", "notify.consumer", "notify.check", "notify.relay", "notify.kafka", "asyncio")


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Killed processes that are threads log that they were killed, and that they reach no server any more."""
    is_death = record.exc_info is not None and isinstance(record.exc_info[1], Crashed)
    return record.levelno > logging.WARNING and not is_death


class Threads:
    """Processes that are threads."""

    def __init__(self, service: Service, kafka: str) -> None:
        self.service = service
        self.kafka = kafka
        self._burying: list[threading.Thread] = []
        self._modules = dict(sys.modules)
        self._packages: set[str] = set()
        self._excepthook, threading.excepthook = threading.excepthook, self._raised
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_is_of_interest)

    def start(self, entrance: Entrance, database: str, fault: Fault | None, is_restarted: bool) -> Explored:
        return _Thread(self, entrance, database, fault, is_restarted)

    def bury(self, run: ServiceRun) -> None:
        self._packages |= run.packages
        thread = threading.Thread(target=run.abandon, name="notify-burying", daemon=True)
        thread.start()
        self._burying = [earlier for earlier in self._burying if earlier.is_alive()] + [thread]

    def rest(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for thread in self._burying:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.rest()
        threading.excepthook = self._excepthook
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(_is_of_interest)
        for name in [name for name in sys.modules if name.partition(".")[0] in self._packages]:
            del sys.modules[name]
        sys.modules.update({n: m for n, m in self._modules.items() if n.partition(".")[0] in self._packages})

    def _raised(self, given: Any) -> None:
        """A thread of a dead process ends as it can."""
        is_djangos = type(given.exc_value).__module__ == "django.db.utils"
        if not is_djangos and not isinstance(given.exc_value, Crashed | sa.exc.DBAPIError):
            self._excepthook(given)


class _Child:
    """A real process."""

    def __init__(self, pid: int, connection: Connection[Any, Any], wait: Callable[[], None]) -> None:
        self.observed = Observed()
        self._pid = pid
        self._connection = connection
        self._wait = wait
        self._has_ended = False
        self._hearing = threading.Thread(target=self._hear, name="notify-explored", daemon=True)
        self._hearing.start()

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.observed.hear(self._connection.recv())
        self.observed.is_dead = True

    def kill(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self._hearing.join(END_SECONDS)
        self._connection.close()


class Children:
    """Real processes, forked one at a time from a process that was forked before the server started its threads."""

    def __init__(self, service: Service, kafka: str) -> None:
        if not hasattr(os, "fork"):
            raise InvalidRequest("real=True forks processes, which this system cannot do")
        self._directory = tempfile.TemporaryDirectory(prefix="notify-explored-")
        self._listener = Listener(os.path.join(self._directory.name, "events"))
        self._commands, theirs = Pipe()
        with warnings.catch_warnings():
            # Other threads of this process hold no locks that the child needs: it forks, and runs the service.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            self._commands.close()
            _fork_on_command(theirs, service, kafka)
        theirs.close()
        self._living: _Child | None = None

    def start(self, entrance: Entrance, database: str, fault: Fault | None, is_restarted: bool) -> Explored:
        self._commands.send((self._listener.address, entrance.url, database, fault, is_restarted))
        pid: int = self._commands.recv()
        self._living = _Child(pid, self._listener.accept(), lambda: self._commands.recv())
        return self._living

    def rest(self) -> None:
        """Nothing is left of a killed process."""

    def close(self) -> None:
        if self._living is not None:
            self._living.kill()
        self._commands.close()
        os.waitpid(self._pid, 0)
        self._listener.close()
        self._directory.cleanup()


def _fork_on_command(commands: Connection[Any, Any], service: Service, kafka: str) -> None:
    """Fork a child for each command, and tell its id, and when it has ended. Never returns."""
    try:
        while True:
            command = commands.recv()
            pid = os.fork()
            if pid == 0:
                commands.close()
                _be_child(service, kafka, *command)
            commands.send(pid)
            os.waitpid(pid, 0)
            commands.send(None)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _be_child(
    service: Service, kafka: str, address: str, url: str, database: str, fault: Fault | None, restarted: bool
) -> None:
    """Run the service until this process is killed."""
    try:
        telling = threading.Lock()
        with Client(address) as connection:
            threading.Thread(target=_die_with, args=(connection,), daemon=True).start()

            def tell(event: Event) -> None:
                if event[0] == "returned" and event[2] is not None:
                    event = ("returned", event[1], _as_text(event[2]))
                with telling:
                    connection.send(event)

            def die() -> None:
                with telling:
                    os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()

            with HOOKS.installed():
                ServiceRun(url, kafka, fault, die, tell).main(service, database, restarted)
                while True:
                    signal.pause()
    finally:
        os._exit(1)


def _die_with(connection: Connection[Any, Any]) -> None:
    """Die when the explorer has ended."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def _as_text(error: object) -> str:
    return "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else str(error)
