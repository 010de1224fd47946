"""The cost of a message for the process that sends it: CPU time a transaction of a real SQLAlchemy session.

Each round runs the same number of transactions of each kind, one kind after the other: a session that inserts a row,
the same with a message in mode half, and the same in mode outbox. A round's difference to its session without a message
is a message's cost there. Run as `python -m notify.bench.session`; the server is another process, SQLite is in this
one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from notify.bench.verify import count_in_queues
from notify.client import (
    AsyncTransactionProducer,
    Message,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.client.loop import new_event_loop
from notify.client.rows import Mode
from notify.client.table import half_message
from notify.testing.databases import postgresql
from notify.testing.process import ServerProcess

KINDS: tuple[Mode | None, ...] = (None, "half", "outbox")
"""Without a message, and with one in each mode."""
TOPIC = "bench-session"
BODY = os.urandom(256)


class Base(DeclarativeBase):
    pass


class BenchOrder(Base):
    __tablename__ = "bench_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(50))


@dataclass(slots=True)
class Turn:
    """A kind's transactions in one round, in milliseconds a transaction."""

    cpu: float
    latency: float

    @classmethod
    def since(cls, began: float, cpu: float, count: int, callers: int) -> Turn:
        """`began`, `cpu`: the clock and the process's CPU time, in seconds, when so many of each caller began."""
        used, took = time.process_time() - cpu, time.perf_counter() - began
        return cls(cpu=1000 * used / (count * callers), latency=1000 * took / count)


@dataclass(slots=True)
class Figures:
    """The turns of one database and one sort of callers, by kind."""

    turns: dict[Mode | None, list[Turn]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def line(self, kind: Mode | None, figure: str) -> dict[str, float]:
        """Median, least and greatest of a figure, and of what a message adds to it, over the rounds."""
        values = [getattr(turn, figure) for turn in self.turns[kind]]
        bare = [getattr(turn, figure) for turn in self.turns[None]]
        added = [value - without for value, without in zip(values, bare, strict=True)]
        shown = added if kind else values
        return {"median": statistics.median(shown), "least": min(shown), "greatest": max(shown)}


class Threads:
    """Callers in threads. Each kind has an engine of its own, without a message one that no producer listens to."""

    def __init__(self, url: str, dsn: str, callers: int) -> None:
        self._callers = callers
        self._engines = {kind: sa.create_engine(dsn, pool_size=callers, max_overflow=0) for kind in KINDS}
        self._producers: dict[Mode, TransactionProducer] = {}
        for kind, engine in self._engines.items():
            if engine.dialect.name == "sqlite":
                use_explicit_begin(engine)
            if kind is not None:
                self._producers[kind] = TransactionProducer(url, group=f"bench-{kind}", engine=engine, mode=kind)

    def turn(self, kind: Mode | None, count: int) -> Turn:
        """Run so many transactions of each caller."""
        callers = [threading.Thread(target=self._transactions, args=(kind, count)) for _ in range(self._callers)]
        began, cpu = time.perf_counter(), time.process_time()
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
        return Turn.since(began, cpu, count, self._callers)

    def _transactions(self, kind: Mode | None, count: int) -> None:
        for _ in range(count):
            with Session(self._engines[kind]) as session, session.begin():
                session.add(BenchOrder(item="x"))
                if kind is not None:
                    self._producers[kind].send(session, Message(TOPIC, BODY))

    def close(self) -> None:
        """Close producers and engines."""
        for producer in self._producers.values():
            producer.close()
        for engine in self._engines.values():
            engine.dispose()


class Coroutines:
    """The same for callers on one event loop."""

    def __init__(self, url: str, dsn: str, callers: int) -> None:
        self._callers = callers
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        dsn = dsn.replace("sqlite:", "sqlite+aiosqlite:")
        self._engines = {kind: create_async_engine(dsn, pool_size=callers, max_overflow=0) for kind in KINDS}
        self._producers = self._runner.run(self._make(url))

    async def _make(self, url: str) -> dict[Mode, AsyncTransactionProducer]:
        producers: dict[Mode, AsyncTransactionProducer] = {}
        for kind, engine in self._engines.items():
            if engine.dialect.name == "sqlite":
                use_explicit_begin(engine)
            if kind is not None:
                producers[kind] = AsyncTransactionProducer(url, group=f"bench-{kind}", engine=engine, mode=kind)
        return producers

    def turn(self, kind: Mode | None, count: int) -> Turn:
        """Run so many transactions of each caller."""
        return self._runner.run(self._all_callers(kind, count))

    async def _all_callers(self, kind: Mode | None, count: int) -> Turn:
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(self._transactions(kind, count) for _ in range(self._callers)))
        return Turn.since(began, cpu, count, self._callers)

    async def _transactions(self, kind: Mode | None, count: int) -> None:
        for _ in range(count):
            async with AsyncSession(self._engines[kind]) as session, session.begin():
                session.add(BenchOrder(item="x"))
                if kind is not None:
                    await self._producers[kind].send(session, Message(TOPIC, BODY))

    def close(self) -> None:
        """Close producers and engines, and the loop."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        for producer in self._producers.values():
            await producer.close()
        for engine in self._engines.values():
            await engine.dispose()


CALLERS: dict[str, Callable[[str, str, int], Threads | Coroutines]] = {"threads": Threads, "asyncio": Coroutines}


def measure(url: str, dsn: str, sort: str, *, rounds: int, count: int, callers: int) -> Figures:
    """Run the rounds, the first of which is not counted; each begins with the kind after the last one's."""
    sessions = CALLERS[sort](url, dsn, callers)
    figures = Figures()
    try:
        for number in range(rounds + 1):
            for place in range(len(KINDS)):
                kind = KINDS[(number + place) % len(KINDS)]
                gc.collect()
                turn = sessions.turn(kind, count)
                if number:
                    figures.turns[kind].append(turn)
    finally:
        sessions.close()
    return figures


def run(databases: list[str], sorts: list[str], *, rounds: int, count: int, callers: int) -> dict[str, Any]:
    """The figures of each database and sort of callers, verified; `count`: transactions of a caller in a turn.

    Raises NotAvailable where PostgreSQL cannot be had.
    """
    shown: dict[str, Any] = {"rounds": rounds, "transactions": count, "callers": callers, "lost": 0, "duplicated": 0}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        expected: set[str] = set()
        for database in databases:
            dsn = f"sqlite:///{directory}/bench.db" if database == "sqlite" else stack.enter_context(postgresql())
            engine = sa.create_engine(dsn)
            Base.metadata.create_all(engine)
            create_tables(engine)
            for sort in sorts:
                figures = measure(server.url, dsn, sort, rounds=rounds, count=count, callers=callers)
                shown[f"{database}, {sort}"] = {
                    f"{kind or 'bare'}_{figure}": figures.line(kind, figure)
                    for kind in KINDS
                    for figure in ("cpu", "latency")
                }
            rows = _rows(engine)
            engine.dispose()
            sent = (rounds + 1) * count * callers * len(sorts)
            shown["lost"] += sum([sent - len(rows[mode]) for mode in rows])
            expected |= rows["half"]
        stored = count_in_queues(server.url, TOPIC)
        shown["lost"] += len(expected - stored.keys())
        shown["duplicated"] = sum(number > 1 for number in stored.values()) + len(stored.keys() - expected)
    return shown


def _rows(engine: sa.Engine) -> dict[str, set[str]]:
    """The ids of the transactions that the database committed with a message, by mode."""
    t = half_message.c
    found: dict[str, set[str]] = {mode: set() for mode in KINDS if mode}
    with engine.connect() as connection:
        for mode, transaction_id in connection.execute(sa.select(t.mode, t.transaction_id)):
            found[mode].add(str(transaction_id))
    return found


def _print(shown: dict[str, Any]) -> None:
    print(f"{'':24} {'without a message':>24} {'half adds':>26} {'outbox adds':>26}")
    for name, figures in shown.items():
        if not isinstance(figures, dict):
            continue
        for figure, label in (("cpu", "CPU"), ("latency", "latency")):
            cells = [figures[f"{kind or 'bare'}_{figure}"] for kind in KINDS]
            texts = [f"{c['median']:.3f} ({c['least']:.3f} to {c['greatest']:.3f})" for c in cells]
            print(f"{name + ' ' + label:24} {texts[0]:>24} {texts[1]:>26} {texts[2]:>26}")


def main() -> int:
    """Measure once, as the arguments say; exit code 1 if a message was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    parser.add_argument("--sorts", nargs="+", choices=CALLERS, default=list(CALLERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transactions", type=int, default=200, help="of each caller, kind and round")
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    shown = run(
        options.databases,
        options.sorts,
        rounds=options.rounds,
        count=options.transactions,
        callers=options.callers,
    )
    if options.json:
        print(json.dumps(shown))
    else:
        _print(shown)
        print(f"lost {shown['lost']}, doubled {shown['duplicated']}")
    return 1 if shown["lost"] or shown["duplicated"] else 0


if __name__ == "__main__":
    sys.exit(main())
