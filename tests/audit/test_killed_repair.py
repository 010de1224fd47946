"""A stored plan that is carried out and killed again and again: each effect happens once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import Consumer, Inbox
from notify.client.table import half_message, notify_inbox
from notify.spark.databases import Database
from notify.spark.repair.planning import plan_of
from notify.spark.result import Found
from notify.testing.process import ServerProcess
from tests.audit.killed_repair import Repairs
from tests.audit.repairing import lost, opened, outbox_row, result_of
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.groups import lag, running
from tests.support.http import post
from tests.support.transactions import new_id


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that sends no checks, so that transactions stay in doubt."""
    process = ServerProcess(tmp_path / "data", environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "3600"}).start()
    yield process
    process.stop()


class Ledger:
    """The business effects of a group with an inbox: a row for each time that a message took effect."""

    def __init__(self, shop: Shop, url: str) -> None:
        self._shop = shop
        self._url = url
        with shop.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE ledger (message_id varchar(64))")
        self.consumer = Consumer(url, group="points", inbox=Inbox(shop.engine))

        @self.consumer.subscribe(TOPIC, start="earliest")
        def handle(message: Any, session: Any) -> None:
            session.execute(sa.text("INSERT INTO ledger VALUES (:id)"), {"id": message.first_id})

    def times(self) -> dict[str, int]:
        with self._shop.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT message_id, count(*) FROM ledger GROUP BY message_id")
            return {str(name): int(count) for name, count in rows}

    def settled(self) -> bool:
        return lag(self._url, "points") == 0

    def forget(self, message_ids: set[str]) -> None:
        """Undo effects, with their inbox rows: the messages were acknowledged, and did not take effect."""
        with self._shop.engine.begin() as connection:
            connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id.in_(message_ids)))
            for name in message_ids:
                connection.execute(sa.text("DELETE FROM ledger WHERE message_id = :id"), {"id": name})


def in_doubt(server: ServerProcess, shop: Shop) -> Found:
    """A half without an outcome, whose transaction committed."""
    with contextlib.closing(Database(shop.url)) as database:
        source = database.source_id()
    name = new_id()
    transaction = {"id": name, "messages": [{"topic": TOPIC, "body": "1"}], "check_after": 3600}
    request = {"producer_group": "orders", "source": source, "transactions": [transaction]}
    shard = str(post(server.url, "/v1/transactions", request)["items"][0]["shard"])
    with shop.engine.begin() as connection:
        connection.execute(half_message.insert().values(shop.row(name, shards=shard)))
    return Found("IN_DOUBT", name, evidence={"local": "COMMITTED"})


@pytest.mark.parametrize(
    ("rounds", "kills"), [(1, 4), pytest.param(20, 10, marks=[pytest.mark.long, pytest.mark.timeout(3000)])]
)
def test_no_effect_happens_twice_however_often_a_repair_is_killed(
    server: ServerProcess, shop: Shop, tmp_path: Path, rounds: int, kills: int
) -> None:
    ledger = Ledger(shop, server.url)
    log = server.data_dir
    with running(ledger.consumer, subscribed=True), Repairs(shop.url, log, server.url) as repairs:
        for number in range(rounds):
            before = set(shop.transactions())
            for _ in range(2):
                shop.order()
            acknowledged = {f"{name}.0" for name in shop.transactions() - before}
            eventually(lambda: acknowledged <= ledger.times().keys() and ledger.settled(), "the effects")  # noqa: B023
            ledger.forget(acknowledged)
            cases = [lost(outbox_row(shop)) for _ in range(3)] + [in_doubt(server, shop) for _ in range(2)]
            cases += [
                Found(
                    "ACKED_NO_EFFECT", name.partition(".")[0], groups=["points"], log="data", evidence={"acked_us": 1}
                )
                for name in sorted(acknowledged)
            ]
            path = tmp_path / f"plan-{number}" / "plan.json"
            path.parent.mkdir()
            with opened(shop, server) as inputs:
                plan = plan_of(result_of(*cases), inputs)
            assert len(plan.items) == len(cases), plan.held_back
            plan.write(path)
            within = 1.0
            for _ in range(kills):
                within = max(0.1, min(within, repairs.run(path, within) * 2))
            repairs.run(path)
            names = {case.message_id for case in cases}
            eventually(lambda: names <= ledger.times().keys() and ledger.settled(), "the repaired effects")  # noqa: B023
            repairs.run(path)  # once more, after the effects
            eventually(ledger.settled, "nothing is left")
            assert set(ledger.times().values()) == {1}, ledger.times()
        print(f"{repairs.killed} repairs were killed, {rounds * kills - repairs.killed} ended before")
        assert repairs.killed
