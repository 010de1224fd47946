"""Group commit over a database: what waits while a writer's transaction is on its way goes into the next one.

Requests of many callers become one transaction of multi-row statements. A batch is repeated after a deadlock
or a lost connection. Ids make this harmless, because an existing half is compared, and a recorded
outcome stays. So a connection that is cut at COMMIT neither loses nor doubles anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import structlog

from notify.errors import InvalidRequest, NotifyError, StorageFailed, Unavailable
from notify.protocol import ids
from notify.runtime import faults
from notify.runtime.backoff import Backoff
from notify.runtime.databases import is_full
from notify.storage.records import Decided, NewTransaction, Put, PutResult, State
from notify.storage.sql.dialect import (
    Again,
    Dialect,
    Duplicate,
    Gone,
    given_up,
    invalid_value,
    is_a_values_fault,
    is_of_the_database,
)
from notify.storage.sql.engines import RECYCLE_SECONDS
from notify.storage.sql.rows import UNDECIDED, is_same, rows_of, text_of
from notify.storage.transactions import NO_TOKENS

log = structlog.get_logger("notify.sql")

WRITERS = 2
BATCH_TRANSACTIONS = 1000
BATCH_BYTES = 8 << 20
WAITING_BYTES = 64 << 20
GIVE_UP_SECONDS = 2.5
"""How long a batch is retried: less than the SDK waits for its half."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.05, 0.5
KNOWN_HALVES = 50_000

_COMMITTED = Decided(True, State.COMMITTED, True)
_ROLLED_BACK = Decided(True, State.ROLLED_BACK, True)


@dataclass(slots=True)
class _Job:
    """One call of `put` or `decide`, and the future that waits for it."""

    answer: asyncio.Future[Any]
    now_us: int
    size: int
    count: int
    halves: Sequence[NewTransaction] = ()
    outcomes: Sequence[tuple[bytes, str | None, State]] = ()
    tokens: Mapping[bytes, int] = field(default_factory=dict)
    result: Any = None


class Writer:
    """Writes halves and outcomes of one database in its own threads. Call `put` and `decide` on one event loop."""

    def __init__(self, dialect: Dialect, read_rows: Callable[[Sequence[str]], dict[str, list[Any]]], name: str) -> None:
        """`read_rows` returns the rows of transactions, in message order; it is called in a thread."""
        self._dialect = dialect
        self._read_rows = read_rows
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Group and number of messages of halves that this process stored, which saves a read before their outcome."""
        self._known_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.batches = 0
        self.failing_since = 0.0
        """When the database was lost (time.monotonic); 0 while it answers."""

    def start(self, writers: int) -> None:
        for number in range(writers):
            thread = threading.Thread(target=self._run, name=f"notify-sql-{self._name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # --- on the loop ------------------------------------------------------------------------------------------

    async def put(self, halves: Sequence[NewTransaction], now_us: int) -> list[PutResult | NotifyError]:
        """The result for each transaction; an error concerns only its own."""
        size = sum([len(m.payload) + 300 for t in halves for m in t.messages])
        job = _Job(self._loop.create_future(), now_us, size, len(halves), halves=halves)
        results: list[PutResult | NotifyError] = await self._submit(job)
        return results

    async def decide(
        self, outcomes: Sequence[tuple[bytes, str | None, State]], now_us: int, tokens: Mapping[bytes, int] = NO_TOKENS
    ) -> list[Decided]:
        job = _Job(
            self._loop.create_future(), now_us, 100 * len(outcomes), len(outcomes), outcomes=outcomes, tokens=tokens
        )
        results: list[Decided] = await self._submit(job)
        return results

    async def _submit(self, job: _Job) -> Any:
        if self._closing:
            raise Unavailable("the server is stopping; try again on another one")
        if self._waiting_bytes + job.size > WAITING_BYTES:
            raise Unavailable("the database cannot keep up: too many writes are waiting; try again")
        self._waiting_bytes += job.size
        self._jobs.put(job)
        try:
            return await job.answer
        finally:
            self._waiting_bytes -= job.size

    async def close(self) -> None:
        """Write what waits, then stop the threads."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 2 * GIVE_UP_SECONDS + 10)

    # --- in a writer's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        connection: Any = None
        used = 0.0
        while True:
            batch = self._take()
            if batch is None:
                break
            if connection is not None and time.monotonic() - used > RECYCLE_SECONDS:
                _close(connection)  # the database may have closed it meanwhile
                connection = None
            connection = self._write(connection, batch)
            used = time.monotonic()
            self._tell(batch)
        if connection is not None:
            _close(connection)

    def _take(self) -> list[_Job] | None:
        """Take the waiting jobs, within the bounds of a batch; None at the end."""
        first = self._jobs.get()
        if first is None:
            return None
        batch, count, size = [first], first.count, first.size
        while count < BATCH_TRANSACTIONS and size < BATCH_BYTES:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is None:
                self._jobs.put(None)
                break
            batch.append(job)
            count += job.count
            size += job.size
        return batch

    def _tell(self, batch: list[_Job]) -> None:
        try:
            self._loop.call_soon_threadsafe(_answer, batch)
        except RuntimeError:
            return  # the loop is closed, so nothing waits for the result

    def _write(self, connection: Any, batch: list[_Job]) -> Any:
        """Carry a batch out and set the jobs' results. Returns the connection to use next; None if it is lost."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        careful = False
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            try:
                if connection is None:
                    connection = self._dialect.connect()
                self._attempt(connection, batch, careful)
                self.batches += 1
                self.failing_since = 0.0
                return connection
            except Exception as raised:
                cause = raised.orig if hasattr(raised, "orig") else raised
                error = self._dialect.error(cause)
                connection = self._recovered(connection, error)
                if isinstance(error, Duplicate | _LookFirst) and time.monotonic() < deadline:
                    careful = careful or isinstance(error, Duplicate)
                    continue
                if not (isinstance(error, Again | Gone | Duplicate) or is_full(cause)):
                    return self._refuse(connection, batch, error)
                if isinstance(error, Gone):
                    self.failing_since = self.failing_since or time.monotonic()
                wait = backoff.next()
                if time.monotonic() + wait > deadline:
                    for job in batch:
                        job.result = given_up(self._name, cause)
                    return connection
                time.sleep(wait)

    def _recovered(self, connection: Any, error: Exception) -> Any:
        """The connection after a rollback; None if that failed, or if the connection was lost before."""
        if connection is None:
            return None
        if not isinstance(error, Gone):
            try:
                self._dialect.rollback(connection)
            except Exception as failed:
                if not is_of_the_database(failed):
                    faults.unexpected("rollback_failed", failed, shard=self._name)
                # Otherwise the connection is lost too.
            else:
                return connection
        _close(connection)
        return None

    def _refuse(self, connection: Any, batch: list[_Job], error: Exception) -> Any:
        """The database refuses something in the batch: try each half of it alone, then the halves of a job, down
        to the refused transaction. The callers of each half are answered when it is done."""
        if len(batch) > 1:
            middle = len(batch) // 2
            for jobs in (batch[:middle], batch[middle:]):
                connection = self._write(connection, jobs)
                self._tell(jobs)
            return connection
        job = batch[0]
        if len(job.halves) > 1:
            middle = len(job.halves) // 2
            results: list[Any] = []
            for halves in (job.halves[:middle], job.halves[middle:]):
                part = replace(job, halves=halves, count=len(halves), result=None)
                connection = self._write(connection, [part])
                results += [part.result] * len(halves) if isinstance(part.result, NotifyError) else part.result
            job.result = results
            return connection
        refused: NotifyError
        if isinstance(error, NotifyError):
            refused = error
        elif not (is_a_values_fault(error) or is_of_the_database(error)):
            faults.unexpected("write_failed", error, shard=self._name)
            refused = StorageFailed("the server failed on this; its log says why")
        else:
            log.error("database_refused", shard=self._name, error=str(error)[:500])
            is_value = is_a_values_fault(error)
            refused = invalid_value(error) if is_value else StorageFailed(f"the database refuses this: {error}")
        job.result = [refused] if job.halves else refused
        return connection

    def _attempt(self, connection: Any, batch: list[_Job], careful: bool) -> None:
        """Carry a batch out in one transaction. `careful`: a row already existed, so look before inserting."""
        if careful:
            self._put_carefully(connection, batch)
        else:
            rows = [row for job in batch for t in job.halves for row in rows_of(t, job.now_us)]
            if rows:
                self._dialect.insert(connection, rows)
            for job in batch:
                if job.halves:
                    job.result = [_stored(t) for t in job.halves]
        self._decide(connection, [job for job in batch if job.outcomes])
        self._dialect.commit(connection)
        with self._known_lock:
            for job in batch:
                for t in job.halves:
                    if not t.committed:
                        self._known[ids.to_text(t.id)] = (t.producer_group, len(t.messages))
            while len(self._known) > KNOWN_HALVES:
                self._known.popitem(last=False)

    def _put_carefully(self, connection: Any, batch: list[_Job]) -> None:
        halves = [t for job in batch for t in job.halves]
        there = self._read_rows([ids.to_text(t.id) for t in halves])
        fresh: dict[bytes, NewTransaction] = {}
        rows = []
        for job in batch:
            if not job.halves:
                continue
            job.result = results = []
            for t in job.halves:
                stored = there.get(ids.to_text(t.id))
                if stored is not None:
                    put = Put.ALREADY if is_same(t, stored) else Put.IN_USE
                    results.append(PutResult(put, State[stored[0]["state"]]))
                elif t.id in fresh:
                    same = fresh[t.id].messages == t.messages and fresh[t.id].producer_group == t.producer_group
                    put = Put.ALREADY if same else Put.IN_USE
                    results.append(PutResult(put, State.COMMITTED if fresh[t.id].committed else State.PREPARED))
                else:
                    fresh[t.id] = t
                    rows += rows_of(t, job.now_us)
                    results.append(_stored(t))
        if rows:
            self._dialect.insert(connection, rows)

    # --- outcomes ---------------------------------------------------------------------------------------------

    def _decide(self, connection: Any, jobs: list[_Job]) -> None:
        """Record the outcomes of a batch by compare and set. An earlier decision in the batch stays."""
        if not jobs:
            return
        wanted: dict[str, tuple[str | None, State, int | None, int]] = {}
        clear = True
        for job in jobs:
            for transaction_id, group, outcome in job.outcomes:
                name = ids.to_text(transaction_id)
                if name in wanted:
                    clear = False
                else:
                    wanted[name] = (group, outcome, job.tokens.get(transaction_id), job.now_us)
        if clear and self._decide_known(connection, wanted):
            for job in jobs:
                job.result = [_COMMITTED if o[2] == State.COMMITTED else _ROLLED_BACK for o in job.outcomes]
            return
        found = {row[0]: row for row in self._dialect.lock(connection, list(wanted))}
        for job in jobs:
            job.result = [self._judge(ids.to_text(o[0]), o, job, found) for o in job.outcomes]
        for outcome in (State.COMMITTED, State.ROLLED_BACK):
            names = [
                ids.to_text(o[0])
                for job in jobs
                for o, decided in zip(job.outcomes, job.result, strict=True)
                if decided.changed and o[2] == outcome
            ]
            if names:
                self._dialect.decide(connection, names, outcome.name, text_of(jobs[0].now_us))

    def _judge(
        self, name: str, o: tuple[bytes, str | None, State], job: _Job, found: dict[str, tuple[str, str, str, int]]
    ) -> Decided:
        row = found.get(name)
        if row is None:
            return Decided(False)
        _, state, group, token = row
        if o[1] is not None and (group or o[1]) != o[1]:
            return Decided(True, State[state], foreign=True)
        if state not in UNDECIDED:
            return Decided(True, State[state], False)
        if job.tokens.get(o[0], token) != token:
            return Decided(True, State[state], stale=True)
        found[name] = (name, o[2].name, group, token)
        return Decided(True, o[2], True)

    def _decide_known(self, connection: Any, wanted: Mapping[str, tuple[str | None, State, int | None, int]]) -> bool:
        """Record them in one statement if this process stored every half and no check is answered.

        Otherwise it returns False and changes nothing. Raises _LookFirst if the number of rows shows an earlier
        decision.
        """
        rows = {State.COMMITTED: 0, State.ROLLED_BACK: 0}
        names: dict[State, list[str]] = {State.COMMITTED: [], State.ROLLED_BACK: []}
        at = 0
        for name, (group, outcome, token, now_us) in wanted.items():
            known = self._known.get(name)
            if known is None or token is not None or group not in (None, known[0]):
                return False
            rows[outcome] += known[1]
            names[outcome].append(name)
            at = max(at, now_us)
        changed = all(
            self._dialect.decide(connection, names[outcome], outcome.name, text_of(at)) == rows[outcome]
            for outcome in rows
            if names[outcome]
        )
        with self._known_lock:
            for name in wanted:
                self._known.pop(name, None)
        if not changed:
            # The transaction is repeated, and looks before it decides.
            raise _LookFirst("an outcome of these is recorded already")
        return True


class _LookFirst(Again):
    """Not a fault: the fast path does not apply."""


def _stored(t: NewTransaction) -> PutResult:
    return PutResult(Put.STORED, State.COMMITTED if t.committed else State.PREPARED)


def _answer(batch: list[_Job]) -> None:
    for job in batch:
        if job.answer.done():
            continue
        if isinstance(job.result, NotifyError):
            job.answer.set_exception(job.result)
        elif job.result is None:
            job.answer.set_exception(InvalidRequest("an empty batch"))
        else:
            job.answer.set_result(job.result)


def _close(connection: Any) -> None:
    try:
        connection.close()
    except Exception:
        return  # the connection is lost already
