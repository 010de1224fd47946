"""Schedules whose messages a relay or bridge moves to Kafka: each instant is there once, and is consumed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables
from tests.support.clock import eventually
from tests.support.commands import Command
from tests.support.databases import empty_database
from tests.support.groups import running
from tests.support.http import admin
from tests.support.kafka import committed
from tests.support.schedules import each_second, stored
from tests.support.servers import Started, make_storage, until_known
from tests.support.shop import Base, Order, items, make_engine

pytest.importorskip("confluent_kafka")

from notify.kafka.records import ID, header, listed


@pytest.mark.long
@pytest.mark.parametrize("mover", ["relay", "bridge"])
def test_each_instant_is_consumed_once(
    mover: str, request: pytest.FixtureRequest, kafka_url: str, database_urls: Mapping[str, str], tmp_path: Path,
    unique: str,
) -> None:  # fmt: skip
    """Over the kill of a server that takes turns with another one, and of the mover."""
    with ExitStack() as stack:
        if mover == "relay":
            storage = stack.enter_context(empty_database("postgresql", database_urls, tmp_path))
        else:
            storage = request.getfixturevalue("binlog_url")
        make_storage(storage)
        started = Started(storage, tmp_path, stack)
        first, second = started.add(), started.add()
        until_known([first, second])
        moving = Command(mover, "--dsn", storage, "--url", kafka_url).start()
        stack.callback(moving.close)
        engine = make_engine(f"sqlite:///{tmp_path}/effects.db")
        stack.callback(engine.dispose)
        create_tables(engine)
        Base.metadata.create_all(engine)
        names = [f"{unique}-{n}" for n in range(4)]
        with TransactionProducer(f"{first.url},{second.url}", group="shop") as producer:
            for name in names:
                message = Message(unique, name, key=name)
                producer.schedule(name, message, every=1, catch_up="all", catch_up_most=1000)
        consumer = Consumer(kafka_url, group=unique, inbox=Inbox(engine))

        @consumer.subscribe(unique, start="earliest")
        def note(message: Any, session: Session) -> None:
            session.add(Order(item=f"{message.text} {message.headers['notify-scheduled-for']}"))

        with running(consumer):
            eventually(lambda: len(items(engine)) >= 12, "three effects of each schedule")
            first.kill()
            before = len(items(engine))
            eventually(lambda: len(items(engine)) >= before + 12, "effects after the server was killed")
            moving.kill()
            sent = len(stored(storage))
            eventually(lambda: len(stored(storage)) >= sent + 4, "messages while nothing moves them")
            moving.start()
            for name in names:
                admin(second.url, "POST", f"schedules/{name}/pause", {})
            rows = stored(storage)
            wanted = Counter(
                f"{row['headers']['notify-schedule']} {row['headers']['notify-scheduled-for']}" for row in rows
            )
            eventually(lambda: len(items(engine)) >= len(rows), "the effect of each message")
        assert Counter(items(engine)) == wanted
    for name in names:
        each_second([row for row in rows if row["headers"]["notify-schedule"] == name])
    records = committed(kafka_url, unique, wanted=len(rows))
    assert Counter(header(listed(record), ID) for record in records) == Counter(f"{row['id']}.0" for row in rows)
