"""A service with an outbox on MariaDB, and a bridge that moves it to a queue server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sqlalchemy.orm import Session

from notify.binlog_bridge.pump import Bridge
from notify.client import Message, TransactionProducer, create_tables
from notify.testing.process import ServerProcess
from tests.support.groups import drain
from tests.support.shop import Base, Order, make_engine


def outbox(url: str, topic: str, numbers: range, **options: Any) -> None:
    """Orders with their messages, each a transaction of its own."""
    engine = make_engine(url)
    create_tables(engine)
    Base.metadata.create_all(engine)
    with TransactionProducer("http://127.0.0.1:9", group=topic, engine=engine, mode="outbox") as producer:
        for n in numbers:
            with Session(engine) as session, session.begin():
                session.add(Order(item=str(n)))
                producer.send(session, Message(topic, {"n": n}, key="k", **options))
                if n % 4 == 3:
                    session.rollback()
    engine.dispose()


def move(url: str, server: ServerProcess, **options: Any) -> Bridge:
    bridge = Bridge([url], server.url)
    asyncio.run(bridge.run(once=True, **options))
    return bridge


def numbers(server: ServerProcess, group: str, count: int) -> list[int]:
    return [json.loads(m["body"])["n"] for m in drain(server.url, group, group, count)]
