"""A relay and rows that a dump brings back: what a target may have already is listed, and an operator releases it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.movers import refused
from notify.movers.refused import retry
from notify.movers.relay.relay import Relay
from notify.testing.process import ServerProcess
from tests.support.groups import bodies, drain, subscribe
from tests.support.kafka import committed
from tests.support.returned import DAYS, bring_back
from tests.support.shop import make_engine


def relayed(engine: sa.Engine, url: str) -> tuple[int, int]:
    total = asyncio.run(Relay(engine, url).run(once=True))
    return total.sent, total.refused


def listed(engine: sa.Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row["transaction_id"]: row["code"] for row in refused.listed(connection)}


@pytest.fixture
def outbox(engine_url: str) -> Iterator[sa.Engine]:
    engine = make_engine(engine_url)
    create_tables(engine)
    yield engine
    engine.dispose()


def test_rows_of_weeks_ago_wait_for_an_operator(outbox: sa.Engine, server: ServerProcess, unique: str) -> None:
    """The queue had forgotten their ids: they were published a second time."""
    subscribe(server.url, unique, unique)
    old = [bring_back(outbox, unique, age_seconds=age * DAYS, body=b"%d" % age) for age in (20, 8)]
    bring_back(outbox, unique, age_seconds=6 * DAYS, body=b"young")
    assert relayed(outbox, server.url) == (1, 2)
    assert listed(outbox) == dict.fromkeys(sorted(old), "returned")
    with outbox.begin() as connection:
        retry(connection, [old[1]], "it was never sent")
        refused.drop(connection, [old[0]], "it was sent then")
    assert relayed(outbox, server.url) == (1, 0)
    assert sorted(bodies(drain(server.url, unique, unique, 2))) == ["8", "young"]
    assert list(listed(outbox)) == [old[0]]


@pytest.mark.long
@pytest.mark.parametrize("database", ["postgresql"])
def test_over_kafka_what_is_older_than_what_was_sent_waits(outbox: sa.Engine, kafka_url: str, unique: str) -> None:
    """Kafka knows no ids. A relay that was stopped for weeks sends what waits: nothing newer was sent before it."""
    bring_back(outbox, unique, age_seconds=30 * DAYS, body=b"first")
    bring_back(outbox, unique, age_seconds=20 * DAYS, body=b"second")
    assert relayed(outbox, kafka_url) == (2, 0)
    late = bring_back(outbox, unique, age_seconds=20 * DAYS + 1800, body=b"committed late")
    old = bring_back(outbox, unique, age_seconds=20 * DAYS + 7200, body=b"old")
    bring_back(outbox, unique, age_seconds=10 * DAYS, body=b"third")
    assert relayed(outbox, kafka_url) == (2, 1)
    assert late not in listed(outbox) and listed(outbox) == {old: "returned"}
    with outbox.begin() as connection:
        retry(connection, [old], "it was never sent")
    assert relayed(outbox, kafka_url) == (1, 0)
    came = [message.value() for message in committed(kafka_url, unique, 5)]
    assert sorted(came) == [b"committed late", b"first", b"old", b"second", b"third"]
