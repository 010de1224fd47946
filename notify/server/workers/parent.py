"""The parent of several workers: it forks them, reads their reports, hands them connections, and stops all together."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from notify.errors import InvalidRequest, StorageFailed
from notify.protocol.workers import check_count, remember_logs, workers_of
from notify.runtime.alive import every_seconds, sign, tell
from notify.runtime.signals import Signals, end_by
from notify.server.cluster.workers import DIED, HUNG
from notify.server.serve import cannot_listen
from notify.server.settings import Settings
from notify.server.workers.acceptor import Acceptor
from notify.server.workers.heartbeat import Silence, used_ticks, waits_for_disk
from notify.server.workers.worker import Child, Worker

log = structlog.get_logger("notify.server")

STOP_SECONDS = 60.0
"""How long workers may take to stop before they are killed."""
STOP_AGAIN_SECONDS = 5.0
"""How often workers are told to stop: a worker that was just being forked misses the first signal."""
AGAIN_SECONDS, AGAIN_MAX_SECONDS = 0.05, 5.0
"""The wait before a dead worker is started again; it doubles with each of its deaths in the last minute."""
DEATHS, DEATHS_SECONDS = 10, 60.0
"""After this many deaths of a worker within this time all workers are stopped."""
STACK_SECONDS = 1.0
"""How long a worker that hangs may take to write its stack (at the signal STACK) before it is killed."""
STACK = signal.SIGUSR1


class Parent:
    """Starts the workers and watches over them, in the process's only thread: a fork copies no other."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        sockets: Sequence[socket.socket],
        greet: Callable[[str, int], None] | None,
    ) -> None:
        """`sockets`: one socket, whose connections the parent hands to the workers, or one for each worker. `greet` is
        called with `url` and the number of topics when all workers are ready."""
        self.settings = settings
        self._url = url
        self.child: Child | None = None
        """In a worker: its ends of the pipes and sockets; None in the parent."""
        self._greet = greet
        self._topics = 0
        self._was_ready = False
        self._signed = 0.0
        self._stopping_since = self._asked_to_stop = 0.0
        self._signals = Signals()
        self._failure = ""
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        one = len(sockets) == 1
        self._workers = [Worker(n, None if one else sockets[n]) for n in range(settings.workers)]
        self._silence = Silence(settings.workers, settings.worker_timeout_seconds)
        self._doorway = Acceptor(self._selector, sockets[0], self._hand) if one else None

    def run(self) -> bool:
        """Watch the workers until all have ended, and return True. In each worker it returns False after the fork.

        Raises StorageFailed if the workers ended because of a failure.
        """
        before = self._catch_signals()
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the memory that the workers share
        log.info("starting_workers", url=self._url, workers=len(self._workers))
        while not self._is_over():
            for worker in self._workers:
                is_due = not (worker.pid or self._stopping_since) and time.monotonic() >= worker.start_at
                if is_due and not self._fork(worker):
                    self._forget_parent(before)
                    return False
            self._wait()
            self._sign()
            if self._doorway is not None:
                self._doorway.tick()
            self._heed_signals()  # before `_reap`: a service manager may have stopped the workers as well
            self._reap()
            self._look_for_silent()
            self._kill_if_late()
        self._forget_parent(before)
        if self._failure:
            raise StorageFailed(self._failure)
        return True

    def _sign(self) -> None:
        """Give a sign of life once all workers were ready: those that hang are started again by this process itself."""
        if self._was_ready and time.monotonic() - self._signed >= every_seconds():
            self._signed = time.monotonic()
            sign()

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
        tell("STOPPING=1")
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
            self._stop()  # a worker that was just being forked missed the signal
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
        """Close and undo what only the parent uses: at its end, and in a worker after the fork."""
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
        reports, report_to = os.pipe()
        hear, line = os.pipe()
        parent_channel, worker_channel = (None, None) if self._doorway is None else socket.socketpair()
        pid = os.fork()
        if not pid:
            os.close(reports)
            os.close(line)
            if parent_channel is not None:
                parent_channel.close()
            self.child = Child(worker, report_to, hear, worker_channel)
            return False
        os.close(report_to)
        os.close(hear)
        if worker_channel is not None and parent_channel is not None:
            worker_channel.close()
            parent_channel.setblocking(False)
        worker.channel = parent_channel
        os.set_blocking(reports, False)
        os.set_blocking(line, False)
        worker.pid, worker.reports, worker.line = pid, reports, line
        worker.unfinished, worker.failure, worker.kill_at, worker.used_ticks = b"", "", 0.0, None
        self._silence.heard(worker.number)
        self._selector.register(reports, selectors.EVENT_READ, partial(self._hear, worker))
        return True

    def _wait(self) -> None:
        """Wait for reports of workers, for signals, and for the next start of a worker."""
        due = [worker.start_at for worker in self._workers if not worker.pid]
        seconds = min(self._silence.beat_seconds, every_seconds())
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
        """Hand a connection to a worker, -1: to the first that serves. Returns False if none takes it now."""
        if number >= len(self._workers):
            number = -1
        for worker in self._workers if number < 0 else (self._workers[number],):
            if worker.serves and worker.channel is not None:
                try:
                    socket.send_fds(worker.channel, [b"c"], [connection.fileno()])
                except OSError:
                    continue  # the worker has not taken earlier connections yet, or is ending
                return True
        return False

    def _hear(self, worker: Worker) -> None:
        """Read a worker's reports, lines of JSON: one when it is ready, then its heartbeats, and one if it fails."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(worker.reports, 65536)
            worker.unfinished += data
            if not data:
                self._close_pipes(worker)
        reports, worker.unfinished = said_in(worker.unfinished)
        for report in reports:
            self._heard(worker, report)

    def _heard(self, worker: Worker, report: dict[str, Any]) -> None:
        self._silence.heard(worker.number)
        if "failed" in report:
            worker.failure = str(report["failed"])
        elif "topics" in report:
            worker.is_ready = True
            self._topics = max(self._topics, int(report["topics"]))
            self._tell_who_serves()

    def _tell_who_serves(self) -> None:
        """Tell each worker which workers do not serve. When all serve for the first time, open the port and greet."""
        by_name = {self._name(worker): worker for worker in self._workers}
        away = [name for name, worker in by_name.items() if not worker.serves]
        silent = [name for name, worker in by_name.items() if worker.is_silent or worker.kill_at]
        report = json.dumps({"away": away, "silent": silent}).encode() + b"\n"
        for worker in self._workers:
            if worker.line >= 0:
                with contextlib.suppress(OSError):
                    os.write(worker.line, report)
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
                log.warning("logs_not_remembered", reason=error.strerror)  # the next start tries again
            tell("READY=1")
            log.info("ready", url=self._url, workers=len(self._workers), data_dir=self.settings.data_dir)
            if self._greet is not None:
                self._greet(self._url, self._topics)

    def _look_for_silent(self) -> None:
        """Send no requests to a worker without heartbeats until its next one; after its timeout kill it."""
        for worker in self._workers:
            if worker.pid and not worker.is_ready:
                self._look_at_start(worker)
        self._silence.look()
        for worker in self._workers:
            if not worker.pid or self._stopping_since:
                continue
            is_silent = worker.is_ready and self._silence.is_silent(worker.number)
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

    def _look_at_start(self, worker: Worker) -> None:
        """Count a starting worker as silent only if it makes no progress, because recovery may take long."""
        used = used_ticks(worker.pid)
        if used is None or used != worker.used_ticks or waits_for_disk(worker.pid):
            worker.used_ticks = used
            self._silence.heard(worker.number)

    def _end_silent(self, worker: Worker) -> None:
        """Have a worker that hangs write its stack; it is killed after STACK_SECONDS, whether it did or not."""
        seconds = self.settings.worker_timeout_seconds
        if waits_for_disk(worker.pid):
            log.warning("worker_waits_for_disk", worker=self._name(worker), seconds=seconds)
            self._silence.heard(worker.number)  # a kill would only take effect after the wait
            return
        hung = "it hung: it gave" if worker.is_ready else "it hung while it started: it gave"
        worker.failure = f"{hung} no sign of life for {seconds:g} s (worker_timeout_seconds), and was killed"
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
                if worker.reports >= 0:
                    self._hear(worker)  # it may have reported why it could not start
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
        if lost := self._lost_log():
            self._fail(f"{self._name(worker)} has ended: {lost}")
            return
        wait = min(AGAIN_SECONDS * 2 ** (len(worker.deaths) - 1), AGAIN_MAX_SECONDS)
        worker.start_at, worker.last_end = now + wait, why
        worker.ends[HUNG if was_hung else DIED] += 1
        log.error("worker_ended", worker=self._name(worker), reason=why, again_in_seconds=wait)
        self._tell_who_serves()

    def _lost_log(self) -> str:
        """Why a worker that is started again would begin an empty log; empty if it would not."""
        directory = Path(self.settings.data_dir)
        try:
            check_count(directory, self.settings.workers)
            is_divided = workers_of(directory) > 0
        except InvalidRequest as error:
            return str(error)
        return "" if is_divided else f"the data directory {directory} was deleted or renamed while the workers ran"

    def _close_pipes(self, worker: Worker) -> None:
        if worker.reports >= 0:
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # the selector is closed, or does not have it
                self._selector.unregister(worker.reports)
            os.close(worker.reports)
        if worker.line >= 0:
            os.close(worker.line)
        if worker.channel is not None:
            worker.channel.close()
        worker.reports = worker.line = -1
        worker.channel = None


def said_in(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """(the lines of JSON in `data` that are complete, the bytes of a line that is not)."""
    *lines, rest = data.split(b"\n")
    return [json.loads(line) for line in lines], rest
