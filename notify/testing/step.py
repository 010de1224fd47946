"""Step: a moment at which the crash explorer lets a process die, or a COMMIT fail, and the line of the service's own
code that it is about."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from notify.client.handling.handlers import Handler, is_own_code
from notify.client.producer.outgoing import LoopOutgoing, ThreadOutgoing

MOST_FRAMES = 1000
STATEMENT_CHARACTERS = 60
_MYSQL_LOST = 2013
"""The code of MySQL's clients for a connection that was lost during a query."""
_SDK = str(Path(__file__).parents[1] / "_")[:-1]
_HOOKS = (__file__, str(Path(__file__).with_name("hooks.py")))
"""The files whose frames are those of the hooks, and not of what they wrap."""
_READS = re.compile(r"\s*(?:SELECT|PRAGMA|SHOW|DESCRIBE)\b(?!.*\bFOR UPDATE\b)", re.IGNORECASE | re.DOTALL)
_BEGINS = re.compile(r"\s*(?:BEGIN|START TRANSACTION|SET)\b", re.IGNORECASE)
"""Statements that prepare others, and change nothing themselves."""
AT_COMMIT, AFTER_COMMIT = "before COMMIT", "after COMMIT"
REFUSED_COMMIT, LOST_COMMIT = (
    "the database refused the COMMIT (simulated)",
    "the answer to the COMMIT was lost (simulated)",
)
Place = tuple[str, int]
"""A file and a line of the service's own code."""


@dataclass(frozen=True, slots=True)
class Step:
    """A moment in the run of a process: `what` is about to happen or has happened, at a line of the service's code.
    `number`: 1 for the first time that this happens in the run, and so on."""

    what: str
    file: str
    line: int
    number: int

    @property
    def code(self) -> str:
        """The line of code; empty if its file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        file = self.file
        with contextlib.suppress(ValueError):
            file = str(Path(file).relative_to(Path.cwd()))
        times = f" (time {self.number})" if self.number > 1 else ""
        return f"{self.what}{times} at {file}:{self.line}" + (f"\n    {self.code}" if self.code else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """The event of a run, at a step: the process is killed, or a COMMIT fails and the process lives on."""

    step: Step
    is_kill: bool

    def __str__(self) -> str:
        if self.is_kill:
            return f"killed {self.step}"
        if self.step.what == AT_COMMIT:
            return f"the database refused the COMMIT: {self.step}"
        return f"the answer to the COMMIT was lost: {self.step}"


def faults_at(step: Step) -> list[Fault]:
    """The faults that the explorer tries at a step."""
    return [Fault(step, True)] + ([Fault(step, False)] if step.what in (AT_COMMIT, AFTER_COMMIT) else [])


class Watched(Protocol):
    """The run of a process, which gets its steps."""

    url: str
    """The address of the server by which this process knows it."""
    relay_place: Place | None
    """The line that started this process's relay; None without one."""

    def check_alive(self) -> None:
        """Raises Crashed if the process is dead."""

    def meet(self, what: str, file: str, line: int) -> bool:
        """A step. Raises Crashed if the process is dead, or dies here; True if the COMMIT is to fail."""

    def started(self, outgoing: ThreadOutgoing | LoopOutgoing) -> None:
        """A producer has started, or was used again."""


def executing(run: Watched, statement: str) -> None:
    """A statement of the database, which is a step unless it changes nothing."""
    if _BEGINS.match(statement) or (_READS.match(statement) and not _is_called_by_service()):
        run.check_alive()  # nothing has changed since the step before
    else:
        meet(run, f"before {_shortened(statement)}")


def meet(run: Watched, what: str, place: Place | None = None) -> bool:
    """A step, if the service's own code made it; see Watched.meet. `place`: the line that it is about, where its caller
    is not the service's own code."""
    place = place or _own_line() or _place.get()
    if place is None:
        run.check_alive()
        return False
    return run.meet(what, *place)


_place: ContextVar[Place | None] = ContextVar("place", default=None)
"""The line of the handler, or of the relay, whose message this thread or task is busy with."""


@contextlib.contextmanager
def at_place(place: Place | None) -> Iterator[None]:
    """Steps of this context are about this line."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def place_of_handler(handler: Handler) -> Place | None:
    code = getattr(_unwrapped(handler.call), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def place_of_caller() -> Place | None:
    """The line of the service's own code that calls."""
    return _own_line()


def _unwrapped(function: Any) -> Any:
    while True:
        inner = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if inner is None:
            return getattr(function, "__func__", function)
        function = inner


def _frames() -> Iterator[FrameType]:
    """The frames of the caller, the innermost first, without those of these hooks."""
    frame: FrameType | None = sys._getframe(1)
    greenlet = sys.modules.get("greenlet")
    inner = greenlet.getcurrent() if greenlet is not None else None
    for _ in range(MOST_FRAMES):
        while frame is None:
            # SQLAlchemy runs the statements of coroutines in a greenlet; the coroutine waits in its parent.
            inner = None if inner is None else inner.parent
            if inner is None:
                return
            frame = inner.gr_frame
        if frame.f_code.co_filename not in _HOOKS:
            yield frame
        frame = frame.f_back


def _own_line() -> Place | None:
    """The file and line of the innermost frame that is the service's own code; None if there is none."""
    own = next((frame for frame in _frames() if is_own_code(frame.f_code.co_filename)), None)
    return None if own is None else (own.f_code.co_filename, own.f_lineno)


def is_of_service() -> bool:
    """Whether the service's own code is among the callers, or this thread or task is busy with something of it."""
    return _place.get() is not None or _own_line() is not None


def _is_called_by_service() -> bool:
    """Whether the service's own code executes a statement, and not the SDK."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(_SDK):
            return False
        if is_own_code(file):
            return True
    return False


def _shortened(statement: str) -> str:
    without_hints = re.sub(r"/\*\+.*?\*/", "", statement, flags=re.DOTALL)
    line = re.sub(r"\s+", " ", without_hints).strip()
    return line if len(line) <= STATEMENT_CHARACTERS else f"{line[:STATEMENT_CHARACTERS]}…"


def commit_error(driver: Any, database: str, text: str) -> Exception:
    """An error as a driver's module raises it for a connection to this kind of database that fails at the COMMIT."""
    kind = getattr(driver, "OperationalError", None) or driver.DatabaseError
    error: Exception = kind(_MYSQL_LOST, text) if database in ("mysql", "mariadb") else kind(text)
    return error
