"""Large bodies under sweeps and kills: `python -m tests.crash.bodies --seconds 300 [--kafka]`.

Producers in modes half and outbox commit transactions whose bodies are all stored, some roll back, and all of them are
killed again and again; those in mode half are stopped for longer than the sweep's age, too. Two sweeps, which are
killed as well, delete all the time what is a few seconds old and named by nothing. At the end every committed message
is delivered with its body, and a last sweep leaves no body that no message names. With `--kafka` the relay moves the
outbox to Kafka, where some messages are delayed: they move from topic to topic while sweeps read them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.cli.store import Sweep
from notify.client import Consumer, Message, ReceivedMessage, TransactionProducer, create_tables
from notify.client.bodies import sending
from notify.client.tables.definitions import half_message
from notify.errors import NotifyError
from notify.movers.relay.relay import Relay
from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER
from notify.runtime.databases import RELAYED
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.http import admin
from tests.support.shop import Base, Order, make_engine
from tests.support.verdict import command_line, concluded, judged

TOPIC = "bodies"
AGE_SECONDS = 6.0
"""The age from which sweeps delete."""
USED_WITHIN_SECONDS = 2.0
"""How old an upload may be at its COMMIT; between the two lies what a COMMIT may take on a busy machine."""
STOPPED_SECONDS = AGE_SECONDS + 2
ROLLED_BACK = 0.3
"""The share of transactions that end with a rollback: half of them at the commit, with their bodies stored."""
BODY_BYTES = 2_000
DELAYED, DELAY_SECONDS = 0.5, 2.0
"""The share of messages in Kafka that are delayed, and for how long."""
NOTES = "swept"
"""The file of what sweeps have deleted."""


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    url: str
    directory: str
    kafka: str = ""
    """Where the relay moves messages to, instead of the server."""

    @property
    def urls(self) -> list[str]:
        """Where messages are."""
        return [self.url, self.kafka] if self.kafka else [self.url]

    @property
    def store(self) -> str:
        return f"file://{self.directory}/store"

    def dsn(self, mode: str) -> str:
        return f"sqlite:///{self.directory}/{mode}.db"


def produce(place: Place, mode: Any, seed: int) -> None:
    """Commit transactions with stored bodies until killed; the order in the database has the body's name."""
    logging.disable()
    sending.USED_WITHIN_SECONDS = USED_WITHIN_SECONDS
    chance = random.Random(seed)
    engine = make_engine(place.dsn(mode))
    producer = TransactionProducer(
        place.url, group=mode, engine=engine, mode=mode, store=place.store, store_above=0, half_timeout=1.0,
        store_timeout=1.0, check_after=0.5,
    )  # fmt: skip
    fate = 0.0

    def fail_some(connection: sa.Connection) -> None:  # called after the producer's own
        if fate > 1 - ROLLED_BACK / 2:
            raise ZeroDivisionError

    sa.event.listen(engine, "commit", fail_some)
    number = 0
    while True:
        number += 1
        name = f"{mode}-{seed}-{os.getpid()}-{number}"
        fate = chance.random()
        with suppress(NotifyError, sa.exc.DBAPIError, ZeroDivisionError):
            with Session(engine) as session, session.begin():
                session.add(Order(item=name))
                delay = DELAY_SECONDS if place.kafka and mode == "outbox" and chance.random() < DELAYED else None
                producer.send(session, Message(TOPIC, name.ljust(BODY_BYTES), delay=delay))
                if fate < ROLLED_BACK / 2:
                    raise ZeroDivisionError
        time.sleep(0.01)  # the pause between two transactions, so that a machine with few cores kills many


def sweep(place: Place) -> None:
    """Sweep again and again until killed, and note how many bodies each sweep has deleted."""
    while True:
        with suppress(NotifyError), Path(place.directory, NOTES).open("a") as notes:
            print(once(place)["swept"], file=notes)


def once(place: Place) -> dict[str, Any]:
    if place.kafka:
        purge(place)
    return Sweep(Store(place.store), ["half", "outbox"], AGE_SECONDS, gone=True).run(place.urls, [place.dsn("outbox")])


def purge(place: Place) -> None:
    """Delete the rows of messages that are in Kafka, which alone names their bodies then."""
    engine = make_engine(place.dsn("outbox"))
    with suppress(sa.exc.DBAPIError), engine.begin() as connection:
        connection.execute(sa.delete(half_message).where(half_message.c.relayed == RELAYED))
    engine.dispose()


def move(place: Place) -> None:
    """Move the rows of the outbox until killed, and what is delayed in Kafka."""
    logging.disable()
    engine = make_engine(place.dsn("outbox"))
    with releasing(place):
        asyncio.run(Relay(engine, place.urls[-1]).run(interval=0.05))


def releasing(place: Place) -> AbstractContextManager[None]:
    """Release what is due in Kafka."""
    if not place.kafka:
        return nullcontext()
    from notify.movers.sinks.delays.releaser import releasing

    return releasing(place.kafka)


class Killed:
    """A process that is started again whenever it was killed."""

    def __init__(self, *call: Any, may_be_stopped: bool = False) -> None:
        self._call = call
        self.may_be_stopped = may_be_stopped
        self.kills = self.stops = 0
        self.start()

    def start(self) -> None:
        function, *arguments = self._call
        self._process: BaseProcess = forked.context().Process(target=function, args=tuple(arguments), daemon=True)
        self._process.start()

    def kill(self) -> None:
        assert self._process.pid is not None
        assert self._process.exitcode is None, f"{self._call[0].__name__} ended by itself"
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(PATIENCE_SECONDS)
        self.kills += 1

    def stop_for(self, seconds: float) -> None:
        """As a machine that sleeps, or a process that swaps."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)  # the time for which it stands still
        os.kill(self._process.pid, signal.SIGCONT)
        self.stops += 1


def committed(place: Place) -> set[str]:
    """The names of all orders."""
    names: set[str] = set()
    for mode in ("half", "outbox"):
        engine = make_engine(place.dsn(mode))
        with Session(engine) as session:
            names.update(session.scalars(sa.select(Order.item)))
        engine.dispose()
    return names


def read_all(place: Place, wanted: set[str]) -> tuple[set[str], int]:
    """The names in the bodies of all messages, and how often a body could not be read."""
    consumers = [Consumer(url, group="readers", store=place.store) for url in place.urls]
    got: set[str] = set()

    def on_message(message: ReceivedMessage) -> None:
        got.add(message.text.strip())

    def is_over() -> bool:
        return got >= wanted or any(consumer.failed > 1 for consumer in consumers)

    with ExitStack() as stack, suppress(AssertionError):
        stack.enter_context(releasing(place))
        for consumer in consumers:
            consumer.subscribe(TOPIC, start="earliest", max_attempts=2, retry_min=0.01)(on_message)
            stack.enter_context(running(consumer))
        eventually(is_over, "all messages")
    return got, sum(consumer.failed for consumer in consumers)


def run(
    seconds: float, seed: int, look: Callable[[Place], None] = lambda place: None, *, over_kafka: bool = False
) -> tuple[str, list[str]]:
    """Returns what was done, in words, and what was wrong. `look` is called before the messages are read: a test harms
    what must be noticed."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bodies-"))
        kafka = ""
        if over_kafka:
            from tools.kafka_cluster import KafkaCluster

            nodes = KafkaCluster(Path(directory) / "kafka").start()
            stack.callback(nodes.stop)
            kafka = nodes.url
        server = ServerProcess(Path(directory) / "data").start()
        stack.callback(server.stop)
        place = Place(server.url, directory, kafka)
        for mode in ("half", "outbox"):
            engine = make_engine(place.dsn(mode))
            create_tables(engine)
            Base.metadata.create_all(engine)
            engine.dispose()
        producers = [Killed(produce, place, "half", n, may_be_stopped=True) for n in range(2)]
        producers += [Killed(produce, place, "outbox", n) for n in range(2, 4)]
        sweeps, relay = [Killed(sweep, place) for _ in range(2)], Killed(move, place)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.2 + chance.random())  # the time between two kills
            victim = chance.choice([*producers, *sweeps, relay])
            if victim.may_be_stopped and chance.random() < 0.3:
                victim.stop_for(STOPPED_SECONDS)
            else:
                victim.kill()
                victim.start()
        for process in (*producers, *sweeps):
            process.kill()
        names = committed(place)
        relay.kill()
        half, outbox = make_engine(place.dsn("half")), make_engine(place.dsn("outbox"))
        with TransactionProducer(place.url, group="half", engine=half):
            eventually(lambda: not _in_doubt(place.url), "checks to decide every half")
        asyncio.run(Relay(outbox, place.urls[-1]).run(once=True))
        half.dispose()
        outbox.dispose()
        look(place)
        got, failed = read_all(place, names)
        time.sleep(AGE_SECONDS)  # until all bodies are old enough for the last sweep
        last = once(place)
        swept = sum(map(int, Path(directory, NOTES).read_text().split())) + last["swept"]
        left = set(Store(place.store).names(FOLDER))
    wrong = [f"{len(names - got)} committed messages did not come"] if names - got else []
    wrong += [f"{len(got - names)} messages came that were not committed"] if got - names else []
    wrong += [f"{failed} times a body could not be read"] if failed else []
    wrong += [f"{len(left)} objects are left, and {last['named']} are named"] if len(left) != last["named"] else []
    wrong += [] if swept else ["no sweep has deleted anything"]
    kills = sum(process.kills for process in (*producers, *sweeps, relay))
    stops = sum(process.stops for process in producers)
    words = (
        f"{len(names):,} committed messages with stored bodies, {kills} kills, {stops} producers stopped for "
        f"{STOPPED_SECONDS:g} s, at least {swept:,} bodies deleted by sweeps that were not killed first"
    )
    return words, wrong


def _in_doubt(url: str) -> bool:
    return bool(admin(url, "GET", "transactions?max=1")["transactions"])


def campaign(seconds: float, seed: int, *, over_kafka: bool) -> int:
    words, wrong = run(seconds, seed, over_kafka=over_kafka)
    return concluded(wrong, words)


def main() -> int:
    said = command_line(__doc__, seconds=300.0, seed=None, kafka=False)
    ServerProcess.launch = staticmethod(forked.launch)
    return judged(
        lambda: campaign(said.seconds, said.seed, over_kafka=said.kafka),
        most_seconds=2 * said.seconds + 5 * PATIENCE_SECONDS,
    )


if __name__ == "__main__":
    sys.exit(main())
