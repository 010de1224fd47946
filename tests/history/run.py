"""`make crash-history SECONDS=600`: everything at once on PostgreSQL and MariaDB or MySQL, under every fault.

`make crash-movers` and `make crash-kafka` are the same with other servers. The last line is the verdict: INCONCLUSIVE
if a database cannot run here, if there were fewer messages or kills than `--messages` and `--kills` ask for, and over
Kafka also if there were too few messages or faults, or a kind of fault was never made; and if the history did not end
as planned, but by a fault that failed itself, or with messages that still moved.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.errors import Unavailable
from notify.testing.databases import BINLOG_SERVERS
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.reachable import NotAvailable
from tests.history.checker import History, counts, violations
from tests.history.facts import NOTED, history_of, noted
from tests.history.faults import Faults
from tests.history.messages import is_delayed
from tests.history.room import small_disk
from tests.history.scene import Scene
from tests.history.settling import committed_by, settle
from tests.history.stage import Stage
from tests.support.clock import eventually
from tests.support.kafka_proxy import KafkaProxy
from tests.support.verdict import INCONCLUSIVE, judged
from tools.kafka_cluster import KafkaCluster

DISK_MEGABYTES = 1024
KAFKA_NODES = 3
SETTLE_SECONDS = 180.0
"""A history in which nothing has changed for so long is at its end; what still waits then is stuck."""
SETTLED, LEAST_SETTLE_SECONDS = 3, 300.0
"""A history may take so many times its seconds to come to its end, but at least these."""
START_AND_END_SECONDS = 1200.0
"""How long servers may take to start, and the facts to be gathered."""
MAY_BE_LATE = ("LOST", "STUCK")
"""Violations that are none while something still moves."""
LOOK_SECONDS = 2.0
CALM_SECONDS = 60.0


WAL = ("wal_level=logical", "max_slot_wal_keep_size=2GB")
"""The settings of a PostgreSQL for a bridge."""
LONGER = 4
"""A history that is asked for messages or kills continues for at most so many times its seconds."""
LONG_SECONDS, LONG_DELAY, SHORT_DELAY = 120.0, 70.0, 5.0
"""In a history of so many seconds messages are delayed for more than a minute, which is another topic in Kafka."""
MESSAGES, NODE_KILLS, OTHER_FAULTS = 50_000 / 600, 20 / 600, 50 / 600
"""The least of a history over Kafka, each second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: its history, violations and faults."""

    history: History
    violations: list[str]
    faults: Counter[str]
    never_made: list[str]
    """Kinds of faults that were not made once."""
    refusals: Counter[str]
    """Texts of the refusals of faults that could not be made."""
    endings: Counter[str]
    """How often each process ended by itself."""
    fewest_kills: int
    """The kills of the process, or database, that was killed least."""
    broken: list[str] = field(default_factory=list)
    """Why the history did not end as planned: what is missing then may only be late, and is no violation."""


@dataclass(frozen=True, slots=True)
class Least:
    """How much a history shows at the least: it continues until it has shown it, for a while."""

    messages: int
    """Committed."""
    faults: Mapping[str, int]
    """The number of faults by kind."""
    seconds: float
    """It continues for so long at the most."""
    kills: int = 0
    """Each process, and each database, is killed so often."""
    is_of_campaign: bool = False
    """Whether it continues until every kind of fault was made, and all messages are committed beside faults."""

    def wanted(self, kills: Sequence[str]) -> dict[str, int]:
        """The number of faults by kind; `kills`: the kinds that kill a process or a database."""
        return {**dict.fromkeys(kills, self.kills), **self.faults}


def play(directory: Path, seconds: float, seed: int, scene: Scene, least: Least) -> Outcome:
    """Play a history of so many seconds, and on a slow machine on until it shows the least that is asked for."""
    with ExitStack() as stack:
        room = stack.enter_context(small_disk(directory / "disk", DISK_MEGABYTES))
        stage = Stage(directory, room, scene)
        stack.callback(stage.keep_output)
        stage.start(stack)
        faults = Faults(stage, seed, min(seconds / 3, CALM_SECONDS) if scene.kafka else 0.0)
        faults.start()
        try:
            end = time.monotonic() + seconds
            _tell("everything runs; making faults")
            while (left := end - time.monotonic()) > 0 and not faults.broken:
                stage.hold_or_not()
                time.sleep(min(LOOK_SECONDS, left))  # the pause between two looks
            _go_on(stage, faults, least, end + least.seconds)
        finally:
            faults.stop()
        broken = list(faults.broken)
        if not (least.is_of_campaign or broken):
            eventually(lambda: committed_by(stage) >= least.messages, f"{least.messages} messages", SETTLE_SECONDS)
        _tell("no more faults; waiting until nothing moves any more")
        settled = settle(stage, SETTLE_SECONDS, most_settle_seconds(seconds))
        for line in settled.waiting:
            _tell(f"waited in vain: {line}")
        if settled.moves:
            broken.append(f"after {settled.seconds:.0f} s it still moved: {'; '.join(settled.waiting[:3])}")
        stage.end()
        _tell("gathering what became of each message")
        history = history_of(stage, [] if settled.moves else settled.waiting)
        history.died += faults.died
        history.failed += faults.failed
        counted = faults.done + noted(stage)
        counted["message delayed"] = sum(map(is_delayed, history.committed)) if scene.most_delay else 0
        never = faults.never_made + [name for name in (*NOTED, "message delayed") if not counted[name]]
        endings, fewest = stage.supervisor.endings(), min(faults.done[kind] for kind in faults.kills)
        found, late = violations(history), []
        if broken:
            late = [line for line in found if line.startswith(MAY_BE_LATE)]
            found = [line for line in found if line not in late]
        for line in late:
            _tell(f"no violation, since it may only be late: {line}")
        return Outcome(history, found, counted, never, faults.refusals, endings, fewest, broken)


def most_settle_seconds(seconds: float) -> float:
    """How long a history of so many seconds may take to come to its end."""
    return max(LEAST_SETTLE_SECONDS, SETTLED * seconds)


def _tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def _go_on(stage: Stage, faults: Faults, least: Least, until: float) -> None:
    """Let the history continue until it shows the least, or until this instant of the monotonic clock."""
    has_messages = not least.is_of_campaign
    while time.monotonic() < until and not faults.broken:
        has_faults = all(faults.done[kind] >= count for kind, count in least.wanted(faults.kills).items())
        with suppress(sa.exc.SQLAlchemyError):  # a database is unreachable
            has_messages = has_messages or committed_by(stage) >= least.messages
        if has_messages and has_faults and not (least.is_of_campaign and faults.never_made):
            break
        # A group is replayed only once it has caught up, which it does while callers wait and nothing is stopped.
        stage.hold_or_not(always=least.is_of_campaign and has_messages)
        if has_messages and has_faults and faults.lacks_only_changes:
            faults.only_changes()
        time.sleep(LOOK_SECONDS)  # the pause between two looks


def shortage(outcome: Outcome, seconds: float) -> str:
    """Why a history over Kafka shows too little; "" if it does not."""
    node_kills = outcome.faults["node killed"]
    not_faults = {"message delayed", *NOTED}
    others = sum(count for name, count in outcome.faults.items() if name not in not_faults) - node_kills
    short = [
        f"{had:,} {what} of {round(least * seconds):,}"
        for had, what, least in (
            (len(outcome.history.committed), "messages", MESSAGES),
            (node_kills, "kills of nodes", NODE_KILLS),
            (others, "other faults", OTHER_FAULTS),
        )
        if had < round(least * seconds)
    ]
    return "; ".join(short + [f"never made: {name}" for name in outcome.never_made])


def lacking(outcome: Outcome, least: Least) -> str:
    """Why a history not over Kafka shows less than was asked for; "" if it does not."""
    found = ((len(outcome.history.committed), least.messages, "messages"), (outcome.fewest_kills, least.kills, "kills"))
    return "; ".join(f"{had:,} {what} of {wanted:,}" for had, wanted, what in found if had < wanted)


def report(outcome: Outcome) -> None:
    history = outcome.history
    told = Counter(history.answers.values())
    print(f"{len(history.committed):,} messages committed; callers were told {dict(told)}")
    print(f"{len(history.effects):,} effects in {len(history.expected)} groups")
    if history.records is not None:
        print(f"{len(history.records):,} committed records in Kafka")
    for names in (outcome.faults, outcome.endings):
        for name, count in sorted(names.items()):
            print(f"  {count:5} {name}")
    for refusal, count in outcome.refusals.most_common(20):
        print(f"  {count:5} refused: {refusal}")
    for line in outcome.violations[:50]:
        print(line)


def before_nodes(stack: ExitStack, proxies: list[KafkaProxy]) -> Callable[[int], int]:
    """A function that puts a proxy before a node, and returns its port; the stack ends them."""

    def advertised(port: int) -> int:
        proxies.append(stack.enter_context(KafkaProxy("127.0.0.1", port)))
        return proxies[-1].port

    return advertised


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--over-databases", action="store_true", help="servers store their transactions in databases")
    parser.add_argument("--database", choices=sorted(BINLOG_SERVERS), default="mariadb", help="beside PostgreSQL")
    parser.add_argument("--wal-bridge", action="store_true", help="a bridge reads PostgreSQL's log, instead of a relay")
    parser.add_argument("--messages", type=int, default=0, help="it goes on until so many are committed")
    parser.add_argument("--kills", type=int, default=0, help="and until each process was killed so often")
    parser.add_argument("--slower", type=float, default=1.0, help="pauses between faults are so many times as long")
    parser.add_argument("--workers", type=int, default=1, help="workers of the server, each with a log")
    parser.add_argument("--over-kafka", action="store_true", help="they do, and three nodes of Kafka have the queues")
    parser.add_argument("--keep", action="store_true", help="keep what is left of it, whatever the verdict")
    return parser.parse_args(words)


def least_of(options: argparse.Namespace) -> Least:
    """The least that is asked for."""
    seconds: float = options.seconds
    if options.over_kafka:
        faults = {"node killed": round(NODE_KILLS * seconds)}
        return Least(round(MESSAGES * seconds), faults, LONGER * seconds, is_of_campaign=True)
    is_asked = bool(options.messages or options.kills)
    return Least(options.messages, {}, LONGER * seconds, options.kills, is_of_campaign=is_asked)


def most_seconds(options: argparse.Namespace) -> float:
    """How long a campaign may take: behind that it has no verdict but this."""
    seconds: float = options.seconds
    return seconds + least_of(options).seconds + most_settle_seconds(seconds) + START_AND_END_SECONDS


def campaign(options: argparse.Namespace) -> int:
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    _tell(f"seed {seed}; the verdict comes in {most_seconds(options) / 60:.0f} minutes at the latest")
    directory = Path(tempfile.mkdtemp(prefix="notify-history-"))
    directory.chmod(0o755)  # PostgreSQL runs as another user where this one is root
    least = least_of(options)
    try:
        with ExitStack() as stack:
            servers: dict[str, Any] = {}
            wal = {"settings": WAL} if options.wal_bridge else {}
            for name, kind, more in (("pg", PostgreSqlServer, wal), ("my", BINLOG_SERVERS[options.database], {})):
                place = directory / name
                place.mkdir()
                servers[name] = kind(place, durable=False, **more).create()
                stack.callback(servers[name].stop)
            sources = {name: server.url for name, server in servers.items()}
            kafka, proxies = None, list[KafkaProxy]()
            if options.over_kafka:
                kafka = KafkaCluster(directory, KAFKA_NODES, before_nodes(stack, proxies)).start()
                stack.callback(kafka.stop)
            is_over_databases = options.over_databases or options.over_kafka
            delay = LONG_DELAY if options.seconds >= LONG_SECONDS else SHORT_DELAY
            scene = Scene(
                sources, servers, 4, delay, is_over_databases, options.wal_bridge, kafka, proxies, options.workers,
                slower=options.slower,
            )  # fmt: skip
            outcome = play(directory, options.seconds, seed, scene, least)
            _tell("ending all processes")
    except (NotAvailable, Unavailable) as reason:
        print(f"VERDICT: INCONCLUSIVE {reason}")
        return INCONCLUSIVE
    report(outcome)
    summary = ", ".join(f"{kind} {count}" for kind, count in counts(outcome.violations).items())
    short = shortage(outcome, options.seconds) if options.over_kafka else lacking(outcome, least)
    why_not = "; ".join([*outcome.broken, *([short] if short else [])])
    verdict = "FAIL" if outcome.violations else f"INCONCLUSIVE ({why_not})" if why_not else "PASS"
    if verdict != "PASS" or options.keep:
        print(f"what was left of it is in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    faults = sum(outcome.faults.values())
    print(f"VERDICT: {verdict} {len(outcome.history.committed):,} messages, {faults} faults: {summary}")
    return 1 if outcome.violations else INCONCLUSIVE if why_not else 0


if __name__ == "__main__":
    given = options_of()
    sys.exit(judged(partial(campaign, given), most_seconds(given)))
