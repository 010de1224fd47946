"""The end of a history: waiting until nothing is undecided, and no group is behind."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

import sqlalchemy as sa

from notify.errors import NotifyError
from tests.history.administration import admin, dead_letters, redrive
from tests.history.kafka_log import open_transactions
from tests.history.messages import TOPICS
from tests.history.stage import Stage
from tests.history.tables import EffectRow, Intent, open_engine

QUIET = 3
"""Nothing waits any more after so many looks in turn that saw nothing."""


class Settled(NamedTuple):
    """The end of a history. `waiting`: a sentence for each thing that still waits after so many `seconds`. `moves`:
    whether that still changes."""

    waiting: list[str]
    moves: bool
    seconds: float


def settle(stage: Stage, seconds: float, most_seconds: float) -> Settled:
    """Stop intents, and wait until nothing waits any more, or nothing has changed for `seconds`.

    A stuck message does not change. A large lag takes long on a slow machine, and is waited for `most_seconds`.
    """
    (stage.directory / "stop").touch()
    began = time.monotonic()
    end = began + most_seconds
    deadline = began + seconds
    quiet = 0
    waiting = ["nobody has looked yet"]
    while quiet < QUIET and time.monotonic() < min(deadline, end):
        before = waiting
        try:
            waiting = _waiting(stage)
        except (NotifyError, sa.exc.SQLAlchemyError) as error:
            waiting = [str(error)]
        if waiting != before:
            deadline = time.monotonic() + seconds
        quiet = 0 if waiting else quiet + 1
        time.sleep(0.5)  # the pause between two looks
    now = time.monotonic()
    return Settled(waiting if quiet < QUIET else [], quiet < QUIET and now < deadline, now - began)


def _waiting(stage: Stage) -> list[str]:
    waiting = _without_effect(stage) if stage.scene.kafka else _behind(stage)
    if stage.scene.kafka and not waiting:
        waiting = open_transactions(stage.scene.kafka.brokers, TOPICS)
    for name in stage.sources:
        open_ = admin(stage.any_sender.url, "GET", f"transactions?producer_group={name}")["transactions"]
        waiting += [f"transaction {t['id']} of {name} is {t['state']}" for t in open_[:3]]
    for group in stage.groups_with_letters:
        redrive(stage.url, group)
        left = sum(not letter["redriven"] for letter in dead_letters(stage.url, group))
        if left:
            waiting.append(f"{left} dead letters of {group} were not sent again")
    return waiting


def _behind(stage: Stage) -> list[str]:
    """Messages that are in no queue, and groups that are behind."""
    waiting = []
    committed = committed_by(stage)
    topics = [admin(stage.url, "GET", f"topics/{topic}") for topic in TOPICS]
    queued = sum(queue["end"] for topic in topics for queue in topic["queues"])
    if queued < committed:
        waiting.append(f"{committed - queued} of {committed} committed messages are in no queue")
    for group in (*stage.groups, "broadcast@x"):
        shown = admin(stage.url, "GET", f"groups/{group}")
        lag = sum(queue["lag"] for queue in shown["queues"])
        if lag or shown["paused"]:
            waiting.append(f"group {group} is {lag} behind{', and paused' if shown['paused'] else ''}")
    return waiting


def _without_effect(stage: Stage) -> list[str]:
    """Messages without their effect: offsets of Kafka also count the records of its transactions."""
    had: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for dsn in stage.sources.values():
        engine = open_engine(dsn)
        try:
            with engine.connect() as connection:
                for number, topic in connection.execute(sa.select(Intent.number, Intent.topic)):
                    wanted.update(taker.who for taker in stage.takers if taker.wants(number, topic))
                takers = sa.select(EffectRow.who, sa.func.count()).group_by(EffectRow.who)
                had.update(dict(connection.execute(takers).all()))
        finally:
            engine.dispose()
    return [
        f"{wanted[who] - had[who]} of {wanted[who]} messages had no effect in {who}"
        for who in wanted
        if had[who] < wanted[who]
    ]


def committed_by(stage: Stage) -> int:
    """How many messages producers have committed."""
    return sum(_committed(dsn).total() for dsn in stage.sources.values())


def _committed(dsn: str) -> Counter[str]:
    """How many messages of each topic committed in a database."""
    engine = open_engine(dsn)
    try:
        with engine.connect() as connection:
            topics = sa.select(Intent.topic, sa.func.count()).group_by(Intent.topic)
            return Counter(dict(connection.execute(topics).all()))
    finally:
        engine.dispose()
