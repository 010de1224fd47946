"""`--mode threads`: a real SQLAlchemy session for each transaction, without and with a message by turns.

The difference, in the caller's latency and in this process's CPU time, is the cost of a message.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from notify.client import Message, TransactionProducer, create_tables, use_explicit_begin

ROUNDS = 6


class Base(DeclarativeBase):
    pass


class BenchOrder(Base):
    __tablename__ = "bench_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(50))


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run rounds without and with messages by turns; figures in milliseconds a transaction."""
    engine = _engine(spec)
    Base.metadata.create_all(engine)
    create_tables(engine)
    producer = TransactionProducer(spec["url"], group="bench-threads", engine=engine, half_timeout=30)
    body = os.urandom(spec["body"])
    before = _transactions(engine)  # the server of an earlier run is gone, so its rows cannot be verified

    def bare() -> None:
        with Session(engine) as session, session.begin():
            session.add(BenchOrder(item="x"))

    def messaging() -> None:
        with Session(engine) as session, session.begin():
            session.add(BenchOrder(item="x"))
            producer.send(session, Message("bench-0", body))

    _round(bare, spec["clients"], spec["warmup"] / 2)
    _round(messaging, spec["clients"], spec["warmup"] / 2)
    rounds: dict[str, list[Any]] = {"bare": [], "message": []}
    for _ in range(ROUNDS // 2):
        rounds["bare"].append(_round(bare, spec["clients"], spec["seconds"] / ROUNDS))
        rounds["message"].append(_round(messaging, spec["clients"], spec["seconds"] / ROUNDS))
    producer.close()
    ids = sorted(_transactions(engine) - before)
    Path(spec["ids"]).write_text("\n".join(ids))
    engine.dispose()
    done = rounds["message"]
    committed = sum(len(r[0]) for r in done)
    return {
        "committed": committed,
        "acknowledged": len(ids),
        "ids": spec["ids"],
        "seconds": sum(r[1] for r in done),
        "errors": 0,
        "cpu": sum(r[2] for r in done),
        "latencies": sorted(x for r in done for x in r[0])[:: max(1, committed // 20_000)],
        "bare_p50_ms": _median([x for r in rounds["bare"] for x in r[0]]) * 1000,
        "client_cpu_ms": _cpu_each(done),
        "bare_cpu_ms": _cpu_each(rounds["bare"]),
    }


def _transactions(engine: sa.Engine) -> set[str]:
    with engine.connect() as connection:
        return {str(i) for i in connection.scalars(sa.text("SELECT transaction_id FROM half_message"))}


def _engine(spec: dict[str, Any]) -> sa.Engine:
    dsn = spec["dsn"] or f"sqlite:///{spec['directory']}/bench.db"
    if dsn.startswith("sqlite"):
        engine = sa.create_engine(dsn, connect_args={"timeout": 60}, pool_size=spec["clients"])
        use_explicit_begin(engine)
        return engine
    return sa.create_engine(dsn, pool_size=spec["clients"], max_overflow=0)


def _round(call: Any, clients: int, seconds: float) -> tuple[list[float], float, float]:
    """(latencies, seconds, CPU seconds) of callers in threads."""
    stop_at = time.perf_counter() + seconds
    latencies: list[float] = []

    def caller() -> None:
        own_latencies = []
        while (started := time.perf_counter()) < stop_at:
            call()
            own_latencies.append(time.perf_counter() - started)
        latencies.extend(own_latencies)

    callers = [threading.Thread(target=caller) for _ in range(clients)]
    began, cpu = time.perf_counter(), time.process_time()
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    return latencies, time.perf_counter() - began, time.process_time() - cpu


def _median(values: list[float]) -> float:
    return float(sorted(values)[len(values) // 2]) if values else 0.0


def _cpu_each(rounds: list[Any]) -> float:
    return float(1000 * sum(r[2] for r in rounds) / max(1, sum(len(r[0]) for r in rounds)))
