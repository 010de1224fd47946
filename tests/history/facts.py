"""The facts of a history, gathered from its databases, servers, notes, and Kafka."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import TypeVar

import sqlalchemy as sa

from notify.client.tables.definitions import half_message
from notify.errors import NotifyError
from tests.history.actors import OUTBOX_CALLER
from tests.history.administration import dead_letters
from tests.history.checker import Effect, History
from tests.history.kafka_log import committed_records
from tests.history.messages import TOPICS, is_delayed
from tests.history.stage import Stage
from tests.history.tables import EffectRow, Intent, open_engine, read_notes
from tests.history.takers import IN_ORDER
from tests.support.http import ask

NOTED_AS = {
    "failed": "handler failed",
    "refused": "message refused for good",
    "poison": "poison used up its attempts",
    "deadly": "message killed its process",
}
NOTED = tuple(NOTED_AS.values())
BUSY_SECONDS, AGAIN_SECONDS = 180.0, 1.0
"""How long servers that were just busy are asked again, and the pause between."""
T = TypeVar("T")


def history_of(stage: Stage, unsettled: Sequence[str]) -> History:
    """While the servers still run."""
    history = History(ordered=IN_ORDER, unsettled=list(unsettled), died=stage.supervisor.crashed())
    for name, dsn in stage.sources.items():
        _read_database(stage, history, name, dsn)
    history.expected = {
        taker.who: {number for number, topic in history.committed.items() if taker.wants(number, topic)}
        for taker in stage.takers
    }
    for path in sorted(stage.directory.glob("*.notes")):
        for kind, *words in read_notes(path):
            if kind == "told" and len(words) == 2:
                history.answers[words[0]] = words[1]
            elif kind == "early" and len(words) == 3:
                history.early.append(f"{words[1]} was handled in {words[0]} {words[2]} s before it was due")
    for group in stage.groups_with_letters:
        letters = _patiently(lambda group=group: dead_letters(stage.url, group))  # type: ignore[misc]
        history.refused_for_good[group] = {json.loads(letter["body"])["number"] for letter in letters}
    if stage.scene.kafka:
        brokers = stage.scene.kafka.brokers
        history.records = _patiently(lambda: committed_records(brokers, TOPICS))
    return history


def _patiently(read: Callable[[], T]) -> T:
    """Ask a server that may still be busy, although nothing is stopped any more, again until it answers."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return read()
        except (NotifyError, OSError, HTTPException):
            if time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_SECONDS)  # the pause between two requests


def noted(stage: Stage) -> Counter[str]:
    """How often handlers failed, refused and died."""
    notes = [words[0] for path in stage.directory.glob("consumer *.notes") for words in read_notes(path)]
    return Counter(NOTED_AS[word] for word in notes if word in NOTED_AS)


def _read_database(stage: Stage, history: History, name: str, dsn: str) -> None:
    engine = open_engine(dsn)
    with engine.connect() as connection:
        rows = connection.execute(sa.select(Intent.number, Intent.key, Intent.topic).order_by(Intent.id)).all()
        for row in rows:
            is_late = stage.scene.most_delay > 0 and is_delayed(row.number)
            if row.key.startswith(f"{name}{OUTBOX_CALLER}-") and not is_late:
                history.moved_in_order.setdefault(row.key, []).append(row.number)
        numbers = {row.number: row.topic for row in rows}
        history.committed |= numbers
        history.intents |= {number.partition(".")[0] for number in numbers}
        for row in connection.execute(sa.select(EffectRow).order_by(EffectRow.id)):
            history.effects.append(Effect(row.who, row.number, row.key, row.queue, row.offset, row.committed_at))
        h = half_message.c
        halves = connection.execute(sa.select(h.transaction_id, h.mode, h.state).distinct()).all()
    engine.dispose()
    # The queue server alone knows what an outbox sent; Kafka knows no states.
    knowing = [(stage.any_sender, False), *([] if stage.scene.kafka else [(stage.servers.queue, True)])]
    for server, of_outbox in knowing:
        sent_there = [half for half in halves if (half.mode == "outbox") == of_outbox]
        states = {half.transaction_id: half.state for half in sent_there}
        history.opposite += _opposite(name, server.url, states, [f"/{log}" for log in stage.scene.logs] or [""])


def _opposite(source: str, url: str, halves: Mapping[str, str], logs: Sequence[str]) -> list[str]:
    """Transactions whose outcome on a server is the opposite of the database's (`halves`: states by id).

    `logs`: the paths of the server's logs, of which one at most knows a transaction.
    """
    wrong = []
    ids = list(halves)
    for first in range(0, len(ids), 1000):
        said: dict[str, set[str]] = {name: set() for name in ids[first : first + 1000]}
        for log in logs:
            request = {"producer_group": source, "ids": list(said)}
            path = f"{log}/v1/transactions/states"
            for item in _patiently(lambda path=path, request=request: _items(url, path, request)):  # type: ignore[misc]
                if "state" in item:
                    said[item["id"]].add(item["state"])
        for name, states in said.items():
            wanted = "ROLLED_BACK" if halves[name] == "ROLLED_BACK" else "COMMITTED"
            if states != {wanted} and not (not states and wanted == "ROLLED_BACK"):
                at_server = ", ".join(sorted(states)) or "unknown"
                wrong.append(f"{name} is {wanted} in {source}, and {at_server} at the server")
    return wrong


def _items(url: str, path: str, request: Mapping[str, object]) -> list[dict[str, str]]:
    """Raises NotifyError, OSError, HTTPException."""
    status, answer = ask(url, "POST", path, dict(request))
    if status != 200:
        raise NotifyError(f"{path}: {status} {answer}")
    items: list[dict[str, str]] = answer["items"]
    return items
