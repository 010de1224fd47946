"""Measures the cost of a message for the process that sends it: CPU time a transaction of a real SQLAlchemy session.

Each round runs the same number of transactions of each kind, one kind after the other: a session that inserts a row,
the same with a message in mode half, in mode outbox, and in mode auto, with the server there. The cost of a message is
the difference to the session without a message in the same round; what auto costs more than half is also given as the
ratio of their turns. Run as `python -m tools.bench.session`. The server is
another process; SQLite runs in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from notify.cli.bench.runner import Bench
from notify.cli.bench.verify import count_in_queues
from notify.client import (
    AsyncTransactionProducer,
    Message,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.client.tables.definitions import half_message
from notify.client.tables.half_rows import Mode
from notify.client.threads.loop import new_event_loop
from notify.runtime.signals import exit_on_signal
from notify.testing.databases import postgresql

KINDS: tuple[Mode | None, ...] = (None, "half", "outbox", "auto")
"""Transactions without a message, and with a message in each mode."""
TOPIC = "bench-session"
GROUP = "bench-"
"""A producer group is this and its mode."""
BODY = os.urandom(256)
FLUSH_SECONDS = 60.0
"""How long what was left behind may take: then a figure is wrong, but nothing is lost."""


class Base(DeclarativeBase):
    pass


class BenchOrder(Base):
    __tablename__ = "bench_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(50))


@dataclass(slots=True)
class Turn:
    """The transactions of one kind in one round, in milliseconds a transaction."""

    cpu: float
    latency: float

    @classmethod
    def since(cls, began: float, cpu: float, count: int, callers: int) -> Turn:
        """`began`, `cpu`: the clock and the CPU time of the process in seconds, before each caller ran `count`
        transactions."""
        cpu_seconds, seconds = time.process_time() - cpu, time.perf_counter() - began
        return cls(cpu=1000 * cpu_seconds / (count * callers), latency=1000 * seconds / count)


@dataclass(slots=True)
class Figures:
    """The turns with one database and one sort of callers, by kind."""

    turns: dict[Mode | None, list[Turn]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def line(self, kind: Mode | None, figure: str) -> dict[str, float]:
        """Median, least and greatest value over the rounds: without a message, or of the difference that it makes."""
        values = [getattr(turn, figure) for turn in self.turns[kind]]
        if kind is not None:
            bare = [getattr(turn, figure) for turn in self.turns[None]]
            values = [value - without for value, without in zip(values, bare, strict=True)]
        return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}

    def auto_to_half(self) -> dict[str, float]:
        """The ratio of the CPU time of whole transactions: its median over the rounds, and the interval that has the
        true median with 95 %."""
        pairs = zip(self.turns["auto"], self.turns["half"], strict=True)
        return median_with_interval([auto.cpu / half.cpu for auto, half in pairs])


def median_with_interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and the order statistics between which the true median lies with 95 % (all values if there are too
    few)."""
    ranked, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while (outside := outside + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    low = max(0, rank - 1)
    return {"median": statistics.median(ranked), "low": ranked[low], "high": ranked[n - 1 - low]}


class Threads:
    """Callers in threads. Each kind has its own engine; the kind without a message has one without a producer."""

    def __init__(self, url: str, dsn: str, callers: int) -> None:
        self._callers = callers
        self._engines = {kind: sa.create_engine(dsn, pool_size=callers, max_overflow=0) for kind in KINDS}
        self._producers: dict[Mode, TransactionProducer] = {}
        for kind, engine in self._engines.items():
            if engine.dialect.name == "sqlite":
                use_explicit_begin(engine)
            if kind is not None:
                self._producers[kind] = TransactionProducer(url, group=GROUP + kind, engine=engine, mode=kind)

    def turn(self, kind: Mode | None, count: int) -> Turn:
        """Run `count` transactions of each caller."""
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
            producer.flush(FLUSH_SECONDS)
            producer.close()
        for engine in self._engines.values():
            engine.dispose()


class Coroutines:
    """Callers on one event loop, otherwise like `Threads`."""

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
                producers[kind] = AsyncTransactionProducer(url, group=GROUP + kind, engine=engine, mode=kind)
        return producers

    def turn(self, kind: Mode | None, count: int) -> Turn:
        """Run `count` transactions of each caller."""
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
        """Close producers, engines and the loop."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        for producer in self._producers.values():
            await producer.flush(FLUSH_SECONDS)
            await producer.close()
        for engine in self._engines.values():
            await engine.dispose()


CALLERS: dict[str, Callable[[str, str, int], Threads | Coroutines]] = {"threads": Threads, "asyncio": Coroutines}


def measure(url: str, dsn: str, sort: str, *, rounds: int, count: int, callers: int) -> Figures:
    """Run the rounds; the first one is not counted. Each round begins with another kind than the one before."""
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
    """The verified figures of each database and sort of callers. `count`: transactions of a caller in a turn.

    Raises NotAvailable if PostgreSQL is needed but not available.
    """
    report: dict[str, Any] = {"rounds": rounds, "transactions": count, "callers": callers, "lost": 0, "duplicated": 0}
    with Bench() as bench, ExitStack() as stack:
        server = bench.server()
        expected: set[str] = set()
        for database in databases:
            dsn = f"sqlite:///{bench.directory}/bench.db" if database == "sqlite" else stack.enter_context(postgresql())
            engine = sa.create_engine(dsn)
            Base.metadata.create_all(engine)
            create_tables(engine)
            for sort in sorts:
                figures = measure(server.url, dsn, sort, rounds=rounds, count=count, callers=callers)
                report[f"{database}, {sort}"] = {
                    f"{kind or 'bare'}_{figure}": figures.line(kind, figure)
                    for kind in KINDS
                    for figure in ("cpu", "latency")
                } | {"auto_to_half_cpu": figures.auto_to_half()}
            rows = _rows(engine)
            engine.dispose()
            sent = (rounds + 1) * count * callers * len(sorts)
            report["lost"] += sum([sent - len(rows[mode]) for mode in rows])
            expected |= rows["half"] | rows["auto"]
        stored = count_in_queues(server.url, TOPIC)
        report["lost"] += len(expected - stored.keys())
        report["duplicated"] = sum(number > 1 for number in stored.values()) + len(stored.keys() - expected)
    return report


def _rows(engine: sa.Engine) -> dict[str, set[str]]:
    """The ids of the transactions that the database committed with a message, by the mode of their producer."""
    columns = half_message.c
    by_mode: dict[str, set[str]] = {mode: set() for mode in KINDS if mode}
    with engine.connect() as connection:
        for group, transaction_id in connection.execute(sa.select(columns.producer_group, columns.transaction_id)):
            by_mode[group.removeprefix(GROUP)].add(str(transaction_id))
    return by_mode


def _print(report: dict[str, Any]) -> None:
    print(f"{'':24} {'without a message':>24} {'half adds':>26} {'outbox adds':>26} {'auto adds':>26}")
    for name, figures in report.items():
        if not isinstance(figures, dict):
            continue
        for figure, label in (("cpu", "CPU"), ("latency", "latency")):
            cells = [figures[f"{kind or 'bare'}_{figure}"] for kind in KINDS]
            texts = [f"{cell['median']:.3f} ({cell['least']:.3f} to {cell['greatest']:.3f})" for cell in cells]
            print(f"{name + ' ' + label:24} {texts[0]:>24} {texts[1]:>26} {texts[2]:>26} {texts[3]:>26}")
        ratio = figures["auto_to_half_cpu"]
        print(f"{name}: CPU of auto by half {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")


def main() -> int:
    """Measure once with the options of the command line. The exit code is 1 if a message was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    parser.add_argument("--sorts", nargs="+", choices=CALLERS, default=list(CALLERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transactions", type=int, default=200, help="of each caller, kind and round")
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    report = run(
        options.databases,
        options.sorts,
        rounds=options.rounds,
        count=options.transactions,
        callers=options.callers,
    )
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
        print(f"lost {report['lost']}, doubled {report['duplicated']}")
    return 1 if report["lost"] or report["duplicated"] else 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
