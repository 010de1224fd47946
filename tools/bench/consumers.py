"""`make bench-consumers`: what a user's handler gets, beside plain clients and peers with the same empty handler.

In each round every kind of consumer has a turn: the SDK's on a queue server with its log, with an inbox, and over
Kafka; a plain client of each; RocketMQ's push consumer. A turn handles a pile of messages in a process of its own, with
a group of its own, for `--seconds` at most. Only one system's servers run at a time, and each round begins with another
system. Shares are those of one round, because a machine's speed changes from minute to minute.

Prints a table in Markdown, and writes every figure to `bench-consumers.json`. The exit code is 1 if a turn that handled
its whole pile lost messages, or any turn got one twice.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from notify.cli.bench import transactions
from notify.cli.bench.runner import Process, subscribe
from notify.kafka.cluster import Cluster
from notify.kafka.records import GROUP, ID, Headers
from notify.protocol import ids
from notify.runtime.signals import exit_on_signal
from notify.testing.databases import postgresql
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from notify.testing.usage import cpu_seconds, tree
from tools.bench import fill, sql
from tools.bench.peers import machine
from tools.bench.peers.kafka import Kafka
from tools.bench.peers.rocketmq import RocketMq
from tools.bench.peers.rounds import FAILURES, order
from tools.bench.peers.system import Work
from tools.kafka_cluster import KafkaCluster

TOPIC, KEYED = "pile-0", "keyed-0"
KEYS = 1000
PARTITIONS = 4
KAFKA_BATCH = 500
"""Messages of a transaction of the publisher."""
CALL_SECONDS = 60.0
INBOX_CONNECTIONS = 16
RATE, CALLERS = 200, 4
"""Transactions a second, and their callers, of the turns that measure the time from the commit to the handler."""
WARM_MESSAGES = 20_000


@dataclass(frozen=True, slots=True)
class Kind:
    """A consumer that has turns. `client`: one of clients.CLIENTS. `beside`: the kind that its share is of."""

    name: str
    client: str
    beside: str = ""
    batch: int | None = None
    mode: str = "shared"
    typed: bool = False
    inbox: str = ""
    """`sqlite` or `postgresql`."""


PLAIN = "plain HTTP client"
COMMITS = {"sqlite": "SQLite: single-row commits", "postgresql": "PostgreSQL: single-row commits"}
PLAIN_KAFKA = "Kafka: confluent's consumer"
QUEUE = (
    Kind(PLAIN, "plain"),
    Kind("plain HTTP client that asks for runs", "plain_runs", PLAIN),
    Kind("bare client, no handler", "wire", PLAIN),
    Kind("Consumer", "threads", PLAIN),
    Kind("AsyncConsumer", "coroutines", PLAIN),
    Kind("Consumer, batch=500", "threads", PLAIN, batch=500),
    Kind("AsyncConsumer, batch=500", "coroutines", PLAIN, batch=500),
    Kind("Consumer, typed", "threads", PLAIN, typed=True),
    Kind("AsyncConsumer, typed", "coroutines", PLAIN, typed=True),
    Kind("Consumer, ordered", "threads", PLAIN, mode="ordered"),
    Kind("AsyncConsumer, ordered", "coroutines", PLAIN, mode="ordered"),
)
HANDS = tuple(
    Kind(f"SQLAlchemy by hand on {title}{kind}", client, COMMITS[inbox], inbox=inbox)
    for inbox, title in (("sqlite", "SQLite"), ("postgresql", "PostgreSQL"))
    for kind, client in (("", "by_hand"), (", AsyncSession", "by_hand_async"))
)
"""The transaction of an inbox in a consumer's process, without the SDK and without messages: begin, the row, commit."""
INBOXES = tuple(
    Kind(f"{name}, inbox on {title}{f', batch={batch}' if batch else ''}", client, COMMITS[inbox], batch, inbox=inbox)
    for inbox, title in (("sqlite", "SQLite"), ("postgresql", "PostgreSQL"))
    for name, client, batch in (
        ("Consumer", "threads", None), ("AsyncConsumer", "coroutines", None), ("Consumer", "threads", 500),
    )
)  # fmt: skip
KAFKA = (
    Kind(PLAIN_KAFKA, "confluent"),
    Kind("Kafka: Consumer", "threads", PLAIN_KAFKA),
    Kind("Kafka: AsyncConsumer", "coroutines", PLAIN_KAFKA),
    Kind("Kafka: Consumer, batch=500", "threads", PLAIN_KAFKA, batch=500),
    Kind("Kafka: AsyncConsumer, batch=500", "coroutines", PLAIN_KAFKA, batch=500),
    Kind("Kafka: AsyncConsumer, ordered", "coroutines", PLAIN_KAFKA, mode="ordered"),
)
PUSH = Kind("RocketMQ: push consumer", "rocketmq", PLAIN)
"""Its share is that of the plain client's rate, so that it stands beside the SDK's."""
RATIOS = {
    "thread": ("Consumer", PLAIN),
    "async": ("AsyncConsumer", PLAIN),
    "batch": ("Consumer, batch=500", PLAIN),
    "inbox_postgresql": ("Consumer, inbox on PostgreSQL", PLAIN),
    "kafka": ("Kafka: Consumer", PLAIN_KAFKA),
    "rocketmq": ("Consumer", PUSH.name),
}
"""The ratios of the JSON by their keys: whose rate, by whose. Without figures they are null."""
TIMED = (PLAIN, "Consumer", "AsyncConsumer")
"""The kinds on a queue server that are timed from the commit to the handler."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`messages` of `body` bytes in the pile of each system; a turn takes `seconds` at most. `only`: parts of names."""

    messages: int
    body: int
    seconds: float
    only: tuple[str, ...]

    def chosen(self, kinds: Sequence[Kind]) -> list[Kind]:
        """The kinds that were asked for, and those that their shares are of."""
        chosen = [kind for kind in kinds if not self.only or any(part in kind.name for part in self.only)]
        return [kind for kind in kinds if kind in chosen or any(kind.name == each.beside for each in chosen)]


Figures = dict[str, float]
Turn = Callable[[], Figures]


def consumed(kind: Kind, spec: dict[str, Any], plan: Plan, servers: Callable[[], float]) -> Figures:
    """The figures of one consumer's process. `servers`: the CPU time of the servers so far, in seconds."""
    spec = spec | {
        "client": kind.client, "batch": kind.batch, "mode": kind.mode, "typed": kind.typed, "expected": plan.messages,
        "seconds": plan.seconds,
    }  # fmt: skip
    cpu = servers()
    got = Process("tools.bench.clients", spec).result(10 * plan.seconds + 120)
    cpu = servers() - cpu
    group = got["groups"][0]
    if not group["received"]:
        raise OSError("it got no message")
    is_whole = group["unique"] >= plan.messages
    return {
        "per_second": got["counted"] / got["seconds"],
        "client_us": got["cpu_seconds"] / got["counted"] * 1e6,
        "server_us": cpu / group["received"] * 1e6,
        "handled": group["received"],
        "lost": 0 if is_whole or got["is_cut"] else plan.messages - group["unique"],
        "doubled": group["received"] - group["unique"],
    }


# --- the systems: each yields its turns while its servers run -------------------------------------------------------


@contextlib.contextmanager
def queue_server(directory: Path, plan: Plan, number: int) -> Iterator[dict[str, Turn]]:
    """A queue server with its log, SQLite and PostgreSQL for inboxes."""
    with ExitStack() as stack:
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        spec = {"messages": plan.messages, "body": plan.body, "topics": 1, "orders": True}
        for prefix, keys in (("pile", 0), ("keyed", KEYS)):
            fill.filled(server.url, prefix=prefix, keys=keys, **spec)
        turns: dict[str, Turn] = {}

        def turn(kind: Kind, dsn: str = "") -> None:
            group = f"g{len(turns)}-{number}"
            topic = KEYED if kind.mode == "ordered" else TOPIC

            def run() -> Figures:
                subscribe(server.url, group, topic, mode=kind.mode)
                spec = {"url": server.url, "topics": [topic], "groups": [group], "inbox": dsn}
                return consumed(kind, spec, plan, server.cpu_seconds)

            turns[kind.name] = run

        for kind in plan.chosen(QUEUE):
            turn(kind)
        inboxes = plan.chosen((*HANDS, *INBOXES))
        if any(kind.inbox == "sqlite" for kind in inboxes):
            turns[COMMITS["sqlite"]] = lambda: {"per_second": sqlite_commits(directory / "one.db", plan.seconds)}
        url = ""
        if any(kind.inbox == "postgresql" for kind in inboxes):
            try:
                url = stack.enter_context(postgresql())
            except NotAvailable as error:
                turns[COMMITS["postgresql"]] = functools.partial(_raise, error)
            else:
                turns[COMMITS["postgresql"]] = lambda: {
                    "per_second": sql.postgresql_ceiling(url, max(1, round(plan.seconds)), INBOX_CONNECTIONS)
                }
        for at, kind in enumerate(inboxes):
            if kind.inbox == "sqlite":
                turn(kind, f"sqlite:///{directory}/inbox-{at}.db")
            elif url:
                turn(kind, sql.fresh(url))
        for kind in plan.chosen(QUEUE):
            if kind.name in TIMED:
                turns[f"{kind.name}, timed"] = functools.partial(timed, kind, plan)
        yield turns


def _raise(error: Exception) -> Figures:
    raise error


def timed(kind: Kind, plan: Plan) -> Figures:
    """The time from a caller's commit to the handler, at a server of its own."""
    got = transactions.run(
        clients=CALLERS, rate=RATE, seconds=plan.seconds, warmup=2.0, topics=1, body=plan.body, consume=True,
        end_to_end=True, client=kind.client,
    )  # fmt: skip
    figures = {"p50_ms": got["end_to_end_p50_ms"], "p99_ms": got["end_to_end_p99_ms"]}
    return figures | {"lost": got["lost"], "doubled": got["duplicated"]}


def sqlite_commits(file: Path, seconds: float) -> float:
    """Transactions a second of one writer that inserts one row, with SQLite's default settings."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("CREATE TABLE one (id TEXT PRIMARY KEY, at TEXT)")
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO one VALUES (?, ?)", (ids.to_text(ids.new_id()), "2026-01-01T00:00:00Z"))
        connection.execute("COMMIT")
        count += 1
    rate = count / (time.perf_counter() - began)
    connection.close()
    return rate


@contextlib.contextmanager
def kafka(directory: Path, plan: Plan, number: int) -> Iterator[dict[str, Turn]]:
    """One node of Kafka, whose topic a publisher's transactions have filled, as a bridge's do."""
    with ExitStack() as stack:
        nodes = KafkaCluster(directory).start()
        stack.callback(nodes.stop)
        publish(Cluster.of(nodes.url), plan)
        turns: dict[str, Turn] = {}
        for at, kind in enumerate(plan.chosen(KAFKA)):
            spec = {"url": nodes.url, "topics": [TOPIC], "groups": [f"g{at}-{number}"]}
            turns[kind.name] = functools.partial(consumed, kind, spec, plan, _cpu_of_java)
        yield turns


def publish(cluster: Cluster, plan: Plan) -> None:
    """Make the topic, and publish messages as a bridge does: in transactions, with ids and keys."""
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    admin = cluster.admin()
    for made in admin.create_topics([NewTopic(TOPIC, num_partitions=PARTITIONS, replication_factor=-1)]).values():
        made.result(CALL_SECONDS)
    producer = cluster.producer({"transactional.id": "bench", "linger.ms": 5})
    producer.init_transactions(CALL_SECONDS)
    for start in range(0, plan.messages, KAFKA_BATCH):
        producer.begin_transaction()
        for n in range(start, min(start + KAFKA_BATCH, plan.messages)):
            headers: Headers = [(ID, f"{ids.to_text(ids.new_id())}.0".encode()), (GROUP, b"bench")]
            producer.produce(TOPIC, fill.order(n, plan.body), f"{n % KEYS}".encode(), headers=headers)
            producer.poll(0)
        producer.commit_transaction(CALL_SECONDS)


@contextlib.contextmanager
def rocketmq(directory: Path, plan: Plan, number: int) -> Iterator[dict[str, Turn]]:
    """RocketMQ's broker and name server, and its driver in Java, whose consumer is warm. Bodies have 256 bytes."""
    work = Work(seconds=plan.seconds, pace=RATE, paced_callers=CALLERS)
    if not plan.chosen([PUSH]):
        yield {}
        return
    with RocketMq().started(directory, work) as peer:
        peer.drained(peer.pile(WARM_MESSAGES), WARM_MESSAGES, 1)

        def drained() -> Figures:
            topic = peer.pile(plan.messages)
            cpu, of_driver = _cpu_of_java(), peer.driver.cpu_seconds()
            run = peer.drained(topic, plan.messages, 1)
            of_driver = peer.driver.cpu_seconds() - of_driver
            return {
                "per_second": run.figures["drain"], "lost": run.lost, "doubled": run.doubled, "handled": plan.messages,
                "client_us": of_driver / plan.messages * 1e6,
                "server_us": (_cpu_of_java() - cpu - of_driver) / plan.messages * 1e6,
            }  # fmt: skip

        def paced() -> Figures:
            run = peer.paced()
            return {
                "p50_ms": run.figures["end_to_end_p50"], "p99_ms": run.figures["end_to_end_p99"],
                "lost": run.lost, "doubled": run.doubled,
            }  # fmt: skip

        yield {PUSH.name: drained, f"{PUSH.name}, timed": paced}


def _cpu_of_java() -> float:
    """The CPU time so far of the virtual machines that this bench has started, in seconds."""
    return sum(cpu_seconds(pid) for pid, name in tree(os.getpid()).items() if name == "java")


# --- rounds ---------------------------------------------------------------------------------------------------------

SYSTEMS: dict[str, Callable[[Path, Plan, int], contextlib.AbstractContextManager[dict[str, Turn]]]] = {
    "queue server": queue_server,
    "Kafka": kafka,
    "RocketMQ": rocketmq,
}
VERSIONS: dict[str, Callable[[], str]] = {
    "queue server": lambda: metadata.version("notify-tx"),
    "Kafka": lambda: Kafka().version(),
    "RocketMQ": lambda: RocketMq().version(),
}
Round = dict[str, Figures]


class Report:
    """The figures by round and kind, and why some are missing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rounds: list[Round] = []
        self.skipped: list[str] = []

    def values(self, name: str, figure: str) -> list[float]:
        """A figure of a kind, of the rounds that have it."""
        return [round_[name][figure] for round_ in self.rounds if figure in round_.get(name, {})]

    def shares(self, name: str, beside: str) -> list[float]:
        """The rates of a kind by those of another, round by round."""
        pairs = [(round_.get(name), round_.get(beside)) for round_ in self.rounds]
        return [own["per_second"] / other["per_second"] for own, other in pairs if own and other]

    def wrong(self) -> list[str]:
        """Kinds that lost or doubled messages."""
        return [
            f"{name} lost {figures['lost']:.0f} and doubled {figures['doubled']:.0f} in round {number}"
            for number, round_ in enumerate(self.rounds, 1)
            for name, figures in round_.items()
            if figures.get("lost") or figures.get("doubled")
        ]

    def table(self) -> str:
        """A line for each kind in Markdown: medians of the rounds, with their range where there are several."""
        lines = [
            "| | messages/s | by the rate it stands beside | client, µs of CPU a message | server, µs | p50, ms |",
            "|---|---|---|---|---|---|",
        ]
        ceilings = [Kind(name, "") for name in COMMITS.values()]
        for kind in (*QUEUE, PUSH, *ceilings, *HANDS, *INBOXES, *KAFKA):
            rates = self.values(kind.name, "per_second")
            if not rates:
                continue
            shares = self.shares(kind.name, kind.beside)
            p50 = self.values(f"{kind.name}, timed", "p50_ms")
            cells = [
                kind.name,
                _cell(rates, "{:,.0f}"),
                _cell(shares, "{:.3f}" if shares and statistics.median(shares) < 0.1 else "{:.2f}"),
                _cell(self.values(kind.name, "client_us"), "{:.1f}", with_range=False),
                _cell(self.values(kind.name, "server_us"), "{:.1f}", with_range=False),
                _cell(p50, "{:.2f}"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def as_json(self, versions: dict[str, str]) -> dict[str, Any]:
        kinds = {kind.name: kind for kind in (*QUEUE, PUSH, *HANDS, *INBOXES, *KAFKA)}
        return {
            "machine": machine.described(Path(tempfile.gettempdir())),
            "versions": versions,
            "messages": self.plan.messages,
            "body": self.plan.body,
            "seconds": self.plan.seconds,
            "plain": _median(self.values(PLAIN, "per_second")),
            **{key: _median(self.shares(*names)) for key, names in RATIOS.items()},
            "rounds": self.rounds,
            "shares": {name: _median(self.shares(name, kind.beside)) for name, kind in kinds.items() if kind.beside},
            "not_measured": self.skipped,
        }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _cell(values: Sequence[float], form: str, *, with_range: bool = True) -> str:
    if not values:
        return ""
    median = form.format(statistics.median(values))
    if len(values) == 1 or not with_range:
        return median
    bare = form.partition("}")[0] + "}"
    return f"{median} ({bare.format(min(values))} to {bare.format(max(values))})"


def measure(plan: Plan, rounds: int, names: Sequence[str], tell: Callable[[str], None]) -> Iterator[Report]:
    """Yield the report after each round, in which each system begins in its turn."""
    report = Report(plan)
    for number in range(rounds):
        round_: Round = {}
        report.rounds.append(round_)
        for name in order(names, number + 1):
            with tempfile.TemporaryDirectory(prefix="notify-bench-", ignore_cleanup_errors=True) as directory:
                try:
                    with SYSTEMS[name](Path(directory), plan, number) as turns:
                        _take_turns(turns, number, round_, report, tell)
                except FAILURES as error:
                    report.skipped.append(f"{name}, round {number + 1}: {error}")
                    tell(report.skipped[-1])
        yield report


def _take_turns(
    turns: dict[str, Turn], number: int, round_: Round, report: Report, tell: Callable[[str], None]
) -> None:
    """All turns of a system, which begin with another kind in each round."""
    for name in order(list(turns), number + 1):
        try:
            round_[name] = turns[name]()
        except FAILURES as error:
            report.skipped.append(f"{name}, round {number + 1}: {error}")
            tell(report.skipped[-1])
            continue
        tell(f"round {number + 1}, {name}: " + ", ".join(f"{key} {value:,.6g}" for key, value in round_[name].items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=100_000, help="of each pile")
    parser.add_argument("--body", type=int, default=256, help="bytes")
    parser.add_argument("--seconds", type=float, default=3.0, help="the longest turn of one consumer")
    parser.add_argument("--only", nargs="+", default=[], help="kinds whose names have one of these in them")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--output", default="bench-consumers.json", help="the file of all figures")
    given = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)

    plan = Plan(given.messages, given.body, given.seconds, tuple(given.only))
    versions: dict[str, str] = {}
    missing: list[str] = []
    for name in given.systems:
        try:
            versions[name] = VERSIONS[name]()
        except FAILURES as error:
            missing.append(f"{name} is not measured: {error}")
    report = Report(plan)
    for report in measure(plan, given.rounds, list(versions), tell):
        report.skipped = missing + [line for line in report.skipped if line not in missing]
        Path(given.output).write_text(json.dumps(report.as_json(versions), indent=1) + "\n")
    tell(f"\n{given.rounds} rounds, {given.messages:,} messages of {given.body} bytes\n\n{report.table()}\n")
    for line in (*report.skipped, *(wrong := report.wrong())):
        tell(line)
    tell(f"see {given.output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    with exit_on_signal():
        sys.exit(main())
