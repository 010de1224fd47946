"""A shop behind nginx with its default settings, while its server is killed every ten seconds.

Run as `python -m tests.crash.proxy --seconds 300`. Orders are committed with their messages, and a consumer with an
inbox gives points for them. The checks: no order is refused, lost or doubled, and neither producer nor consumer ends.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from notify.client import Consumer, Inbox, Message, ReceivedMessage, TransactionProducer, create_tables
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.nginx import Nginx
from tests.support.servers import stop_if_running
from tests.support.shop import make_engine
from tests.support.verdict import command_line, concluded, judged

TOPIC, GROUP = "order.placed", "points"
CALLERS = 3
HALF_SECONDS = 30.0
"""How long an order waits for the server: longer than it takes to start again on a loaded machine."""
PAUSE_SECONDS = 0.01
"""A caller's pause between two orders."""


class Base(DeclarativeBase):
    pass


class Placed(Base):
    __tablename__ = "placed"
    number: Mapped[str] = mapped_column(sa.String(40), primary_key=True)


class Points(Base):
    """An effect; only the inbox prevents a second row for an order."""

    __tablename__ = "points"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(sa.String(40))


@dataclass(slots=True)
class Seen:
    """The events so far."""

    kills: int = 0
    orders: int = 0
    refused: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    is_over: bool = False


def run(directory: Path, kills: int, seconds_between: float) -> tuple[Seen, list[str]]:
    """Kill the server so often, with so much time and at least one order between; what happened, and what is wrong."""
    seen = Seen()
    with ExitStack() as stack:
        server = ServerProcess(directory / "data", environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "1"}).start()
        stack.callback(stop_if_running, server)
        proxy = Nginx(directory / "nginx", server.url).start()
        stack.callback(proxy.stop)
        engine = make_engine(f"sqlite:///{directory}/shop.db")
        stack.callback(engine.dispose)
        create_tables(engine)
        Base.metadata.create_all(engine)
        producer = stack.enter_context(
            TransactionProducer(proxy.url, group="shop", engine=engine, half_timeout=HALF_SECONDS)
        )
        consumer = Consumer(proxy.url, group=GROUP, inbox=Inbox(engine))

        @consumer.subscribe(TOPIC, start="earliest", max_attempts=100, max_deaths=100)
        def give(message: ReceivedMessage, session: Session) -> None:
            session.add(Points(number=message.text))

        def place(caller: int) -> None:
            while not seen.is_over:
                number = f"{caller}.{seen.orders}.{time.monotonic_ns()}"
                try:
                    with Session(engine) as session, session.begin():
                        session.add(Placed(number=number))
                        producer.send(session, Message(TOPIC, number, key=str(caller)))
                    seen.orders += 1
                except Exception as error:
                    seen.refused.append(f"{type(error).__name__}: {error}")
                time.sleep(PAUSE_SECONDS)  # the caller's pace

        def consume() -> None:
            try:
                consumer.run(signals=False)
            except BaseException as error:
                seen.ended.append(f"the consumer: {type(error).__name__}: {error}")
            else:
                if not seen.is_over:
                    seen.ended.append("the consumer returned")

        consuming = threading.Thread(target=consume, daemon=True)
        placing = [threading.Thread(target=place, args=(n,), daemon=True) for n in range(CALLERS)]
        for thread in (consuming, *placing):
            thread.start()
        for _ in range(kills):
            before, began = seen.orders, time.monotonic()
            eventually(lambda before=before: seen.orders > before, "an order")  # type: ignore[misc]
            time.sleep(max(0.0, seconds_between - (time.monotonic() - began)))  # the campaign's pace
            server.kill()
            seen.kills += 1
            server.start()
        last = seen.orders
        eventually(lambda: seen.orders > last, "an order after the last kill")
        seen.is_over = True
        for thread in placing:
            thread.join(PATIENCE_SECONDS)
        wrong = _wrong(engine, seen)
        consumer.stop()
        consuming.join(PATIENCE_SECONDS)
    return seen, wrong + seen.refused[:5] + seen.ended


def _wrong(engine: sa.Engine, seen: Seen) -> list[str]:
    """The lost and doubled orders, once as many effects as orders are there or nothing comes any more."""

    def counts() -> tuple[set[str], Counter[str]]:
        with Session(engine) as session:
            return set(session.scalars(sa.select(Placed.number))), Counter(session.scalars(sa.select(Points.number)))

    def all_came() -> bool:
        placed, points = counts()
        return bool(seen.ended) or placed <= points.keys()

    try:
        eventually(all_came, "every order to have its points", 2 * PATIENCE_SECONDS)
    except AssertionError as late:
        return [str(late), f"lost: {len(counts()[0] - counts()[1].keys())}"]
    placed, points = counts()
    doubled = [number for number, count in points.items() if count > 1]
    ghosts = points.keys() - placed
    return [f"doubled: {doubled[:5]}"] * bool(doubled) + [f"without an order: {sorted(ghosts)[:5]}"] * bool(ghosts)


def main() -> int:
    options = command_line(__doc__, seconds=300.0, every=10.0)
    ServerProcess.launch = staticmethod(forked.launch)
    with tempfile.TemporaryDirectory(prefix="notify-proxy-") as directory:
        seen, wrong = run(Path(directory), max(1, int(options.seconds / options.every)), options.every)
    return concluded(wrong, f"{seen.kills} kills behind nginx: {seen.orders:,} orders, {len(seen.refused)} refused")


if __name__ == "__main__":
    sys.exit(judged(main))
