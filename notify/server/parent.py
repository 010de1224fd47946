"""The parent of several workers: it forks them, hears of them, hands them connections, and ends them together."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from notify.ending import Signals, end_by
from notify.errors import StorageFailed
from notify.server.cluster.workers import DIED, HUNG
from notify.server.doorway import Doorway
from notify.server.heartbeat import Silence, waits_for_disk
from notify.server.serve import cannot_listen
from notify.settings import Settings
from notify.workers import remember_logs

log = structlog.get_logger("notify.server")

STOP_SECONDS = 60.0
"""After so long, workers that have not stopped are killed."""
STOP_AGAIN_SECONDS = 5.0
"""How often workers are told to stop: one that was just being forked does not hear the first signal."""
AGAIN_SECONDS, AGAIN_MAX_SECONDS = 0.05, 5.0
"""The wait before a worker that has died is started again; it doubles with each of its deaths in the last minute."""
DEATHS, DEATHS_SECONDS = 10, 60.0
"""A worker that dies so often within so long is not started again: all stop."""
STACK_SECONDS = 1.0
"""How long a worker that hangs has to write where it stands (STACK) before it is killed."""
STACK = signal.SIGUSR1


@dataclasses.dataclass(slots=True)
class Worker:
    """A worker as its parent knows it."""

    number: int
    bound: socket.socket | None
    """The socket of its own port; None where the parent hands it connections."""
    pid: int = 0
    """0: it does not run."""
    told: int = -1
    """The end of a pipe from which the parent reads what the worker says."""
    line: int = -1
    """The end of a pipe in which the parent says who does not serve; its closing says that the parent is gone."""
    channel: socket.socket | None = None
    """The socket over which the parent hands it connections."""
    said: bytes = b""
    """The part of a line that was read from `told` so far."""
    is_ready: bool = False
    is_silent: bool = False
    """It is ready, and has given no sign of life for a while."""
    kill_at: float = 0.0
    """When to kill it, since it hangs, by the monotonic clock; 0: it does not, as far as is known."""
    failure: str = ""
    """Why it cannot serve, as it said, or why it is killed."""
    start_at: float = 0.0
    """When to start it, by the monotonic clock."""
    deaths: deque[float] = dataclasses.field(default_factory=deque)
    """When it died, within the last minute."""
    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    """How often it was started again, by what had ended it: DIED or HUNG."""
    last_end: str = ""
    """Why it was started again last."""

    @property
    def serves(self) -> bool:
        """Whether it is handed connections."""
        return self.is_ready and not (self.is_silent or self.kill_at)


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """The ends of pipes and sockets that a worker has from its parent."""

    worker: Worker
    tell: int
    """The pipe in which it says that it is ready, or why it cannot be."""
    hear: int
    """The pipe in which it hears which workers do not serve; it is closed when the parent ends."""
    channel: socket.socket | None
    """The socket over which it is handed connections."""


class Parent:
    """Starts the workers and watches over them, in the process's only thread: a fork copies no other."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        sockets: Sequence[socket.socket],
        greet: Callable[[str, int], None] | None,
    ) -> None:
        """`sockets`: one, whose connections this hands to the workers, or one for each worker. `greet` is called with
        `url` and the number of topics, once all workers are ready."""
        self.settings = settings
        self._url = url
        self.child: Child | None = None
        """In a worker: what it has from its parent."""
        self._greet = greet
        self._topics = 0
        self._was_ready = False
        self._stopping_since = self._asked_to_stop = 0.0
        self._signals = Signals()
        self._failure = ""
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        one = len(sockets) == 1
        self._workers = [Worker(n, None if one else sockets[n]) for n in range(settings.workers)]
        self._silence = Silence(settings.workers, settings.worker_timeout_seconds)
        self._doorway = Doorway(self._selector, sockets[0], self._hand) if one else None

    def run(self) -> bool:
        """Watch over the workers until all have ended: True; False in each worker, as soon as it is forked.

        Raises StorageFailed where they have ended because of a failure.
        """
        before = self._catch_signals()
        gc.collect()
        gc.freeze()  # so that collections of the workers leave the memory that they share as it is
        log.info("starting_workers", url=self._url, workers=len(self._workers))
        while not self._is_over():
            for worker in self._workers:
                is_due = not (worker.pid or self._stopping_since) and time.monotonic() >= worker.start_at
                if is_due and not self._fork(worker):
                    self._forget_parent(before)
                    return False
            self._wait()
            if self._doorway is not None:
                self._doorway.tick()
            self._heed_signals()  # before the ends of workers: a service manager may have told them, too
            self._reap()
            self._look_for_silent()
            self._kill_if_late()
        self._forget_parent(before)
        if self._failure:
            raise StorageFailed(self._failure)
        return True

    def _is_over(self) -> bool:
        return bool(self._stopping_since) and not any(worker.pid for worker in self._workers)

    # --- signals ----------------------------------------------------------------------------------------------

    def _catch_signals(self) -> dict[int, Any]:
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        caught = (signal.SIGTERM, signal.SIGINT)
        before: dict[int, Any] = {number: signal.signal(number, self._signals.note) for number in caught}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return before

    def _heed_signals(self) -> None:
        for number, count in self._signals.taken():
            if count > 1:
                self._kill()
                end_by(number)
            self._stop()

    def _stop(self) -> None:
        self._asked_to_stop = time.monotonic()
        self._stopping_since = self._stopping_since or self._asked_to_stop
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, signal.SIGTERM)

    def _fail(self, why: str) -> None:
        """Stop all workers, and end with an error."""
        self._failure = why
        self._stop()

    def _kill_if_late(self) -> None:
        if self._stopping_since and time.monotonic() > self._asked_to_stop + STOP_AGAIN_SECONDS:
            self._stop()  # one that was just being forked has not heard it
        if self._stopping_since and time.monotonic() > self._stopping_since + STOP_SECONDS:
            self._kill()
            self._stopping_since = time.monotonic()

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.pid:
                waited = time.monotonic() - self._stopping_since
                log.error("worker_killed", worker=self._name(worker), waited_seconds=round(waited, 1))
                os.kill(worker.pid, signal.SIGKILL)

    def _forget_parent(self, before: dict[int, Any]) -> None:
        """Let go of what is the parent's alone: at its end, and in a worker that was forked."""
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        self._selector.close()
        if self._doorway is not None:
            self._doorway.close(stop_watching=False)
        for end in (self._wake, self._waker):
            end.close()
        for worker in self._workers:
            self._close_pipes(worker)
            if worker.bound is not None and (self.child is None or worker is not self.child.worker):
                worker.bound.close()

    # --- workers ----------------------------------------------------------------------------------------------

    def _name(self, worker: Worker) -> str:
        return self.settings.key_shards[worker.number]

    def _fork(self, worker: Worker) -> bool:
        """True in the parent, False in the worker."""
        told, tell = os.pipe()
        hear, line = os.pipe()
        handing, taking = (None, None) if self._doorway is None else socket.socketpair()
        pid = os.fork()
        if not pid:
            os.close(told)
            os.close(line)
            if handing is not None:
                handing.close()
            self.child = Child(worker, tell, hear, taking)
            return False
        os.close(tell)
        os.close(hear)
        if taking is not None and handing is not None:
            taking.close()
            handing.setblocking(False)
        worker.channel = handing
        os.set_blocking(told, False)
        os.set_blocking(line, False)
        worker.pid, worker.told, worker.line = pid, told, line
        worker.said, worker.failure, worker.kill_at = b"", "", 0.0
        self._selector.register(told, selectors.EVENT_READ, partial(self._hear, worker))
        return True

    def _wait(self) -> None:
        """Wait for what workers say, for signals, and for the time at which one is started again."""
        due = [worker.start_at for worker in self._workers if not worker.pid]
        seconds = self._silence.beat_seconds
        if due and not self._stopping_since:
            seconds = min(seconds, max(0.0, min(due) - time.monotonic()))
        if self._doorway is not None:
            seconds = min(seconds, self._doorway.due_in())
        for key, _ in self._selector.select(seconds):
            key.data()

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _hand(self, number: int, connection: socket.socket) -> bool:
        """Hand a connection to a worker, -1: to the first that serves; False where it takes none now."""
        if number >= len(self._workers):
            number = -1
        for worker in self._workers if number < 0 else (self._workers[number],):
            if worker.serves and worker.channel is not None:
                try:
                    socket.send_fds(worker.channel, [b"c"], [connection.fileno()])
                except OSError:
                    continue  # the worker has not taken the connections before this one yet, or is ending
                return True
        return False

    def _hear(self, worker: Worker) -> None:
        """A worker says a line of JSON once it is ready, one now and then from then on, and one when it fails."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(worker.told, 65536)
            worker.said += data
            if not data:
                self._close_pipes(worker)
        lines, worker.said = said_in(worker.said)
        for said in lines:
            self._heard(worker, said)

    def _heard(self, worker: Worker, said: dict[str, Any]) -> None:
        self._silence.heard(worker.number)
        if "failed" in said:
            worker.failure = str(said["failed"])
        elif "topics" in said:
            worker.is_ready = True
            self._topics = max(self._topics, int(said["topics"]))
            self._tell_who_serves()

    def _tell_who_serves(self) -> None:
        """Tell each worker who does not serve; open the port, and say so, the first time that all do."""
        names = {self._name(worker): worker for worker in self._workers}
        away = [name for name, worker in names.items() if not worker.serves]
        silent = [name for name, worker in names.items() if worker.is_silent or worker.kill_at]
        told = json.dumps({"away": away, "silent": silent}).encode() + b"\n"
        for worker in self._workers:
            if worker.line >= 0:
                with contextlib.suppress(OSError):
                    os.write(worker.line, told)
        if not away and not self._was_ready:
            self._was_ready = True
            if self._doorway is not None:
                try:
                    self._doorway.open()
                except OSError as error:
                    self._fail(str(cannot_listen(self.settings, error)))
                    return
            try:
                remember_logs(Path(self.settings.data_dir))
            except OSError as error:
                log.warning("logs_not_remembered", reason=error.strerror)  # they are at the next start
            log.info("ready", url=self._url, workers=len(self._workers), data_dir=self.settings.data_dir)
            if self._greet is not None:
                self._greet(self._url, self._topics)

    def _look_for_silent(self) -> None:
        """Leave alone whoever gives no sign of life, until it does; kill it if it does not for too long."""
        self._silence.look()
        for worker in self._workers:
            if not worker.is_ready or self._stopping_since:
                continue
            is_silent = self._silence.is_silent(worker.number)
            if is_silent != worker.is_silent:
                worker.is_silent = is_silent
                say = log.warning if is_silent else log.info
                say("worker_is_silent" if is_silent else "worker_answers_again", worker=self._name(worker))
                self._tell_who_serves()
            if worker.kill_at:
                if time.monotonic() >= worker.kill_at:
                    os.kill(worker.pid, signal.SIGKILL)
            elif self._silence.is_over_long(worker.number):
                self._end_silent(worker)

    def _end_silent(self, worker: Worker) -> None:
        """Have a worker that hangs write where it stands; it is killed a moment later, whatever comes of that."""
        seconds = self.settings.worker_timeout_seconds
        if waits_for_disk(worker.pid):
            log.warning("worker_waits_for_disk", worker=self._name(worker), seconds=seconds)
            self._silence.heard(worker.number)  # a kill would wait for the disk, too
            return
        worker.failure = f"it hung: it gave no sign of life for {seconds:g} s (worker_timeout_seconds), and was killed"
        remedy = "it is killed and started again; its stack is in this output"
        log.error("worker_hangs", worker=self._name(worker), silent_seconds=seconds, remedy=remedy)
        worker.kill_at = time.monotonic() + STACK_SECONDS
        os.kill(worker.pid, STACK)

    def _reap(self) -> None:
        for worker in self._workers:
            if not worker.pid:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                if worker.told >= 0:
                    self._hear(worker)  # why it could not start
                self._ended(worker, os.waitstatus_to_exitcode(status))

    def _ended(self, worker: Worker, code: int) -> None:
        was_hung = bool(worker.kill_at)
        worker.pid, worker.is_ready, worker.is_silent, worker.kill_at = 0, False, False, 0.0
        self._close_pipes(worker)
        if self._stopping_since:
            return
        why = worker.failure or (f"signal {-code}" if code < 0 else f"exit code {code}")
        now = time.monotonic()
        while worker.deaths and worker.deaths[0] < now - DEATHS_SECONDS:
            worker.deaths.popleft()
        worker.deaths.append(now)
        if not self._was_ready or len(worker.deaths) >= DEATHS:
            often = "" if not self._was_ready else f", {DEATHS} times within {DEATHS_SECONDS:g} s"
            self._fail(f"{self._name(worker)} {'has ended' if self._was_ready else 'cannot start'}{often}: {why}")
            return
        wait = min(AGAIN_SECONDS * 2 ** (len(worker.deaths) - 1), AGAIN_MAX_SECONDS)
        worker.start_at, worker.last_end = now + wait, why
        worker.ends[HUNG if was_hung else DIED] += 1
        log.error("worker_ended", worker=self._name(worker), reason=why, again_in_seconds=wait)
        self._tell_who_serves()

    def _close_pipes(self, worker: Worker) -> None:
        if worker.told >= 0:
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # the selector is closed, or has let go of it
                self._selector.unregister(worker.told)
            os.close(worker.told)
        if worker.line >= 0:
            os.close(worker.line)
        if worker.channel is not None:
            worker.channel.close()
        worker.told = worker.line = -1
        worker.channel = None


def said_in(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The lines that a worker has said to its end, and the beginning of the one that is still to come."""
    *lines, rest = data.split(b"\n")
    return [json.loads(line) for line in lines], rest
