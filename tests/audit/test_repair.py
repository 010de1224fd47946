"""What was found is mended through a real server's admin routes: previewed, recorded, repeatable; then all is well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify import ids
from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables
from notify.client.table import half_message, notify_inbox
from notify.testing.process import ServerProcess
from spark.audit import Audit
from spark.databases import Database
from spark.log_input import LogInput
from spark.repair import Repair
from spark.result import Inputs, Plan, Result
from tests.support.databases import empty_database
from tests.support.shop import Base, Order, make_engine

PLAN = Plan(max_transaction_seconds=1, deliver_seconds=1)
TOPIC = "order.placed"


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def actions(server: ServerProcess) -> list[str]:
    with urllib.request.urlopen(server.url + "/v1/admin/actions", timeout=20) as answer:
        return [row["what"] for row in json.load(answer)["actions"]]


class Shop:
    """A service with a consumer that keeps an inbox, on one server."""

    def __init__(self, url: str, server: ServerProcess) -> None:
        self.engine = make_engine(url)
        create_tables(self.engine)
        Base.metadata.create_all(self.engine)
        self.server = server
        self.url = url
        self.producer = TransactionProducer(server.url, group="orders", engine=self.engine)
        self.consumer = Consumer(server.url, group="points", inbox=Inbox(self.engine))
        self.consumer.subscribe(TOPIC, start="earliest")(lambda message, session: None)

    def order(self, count: int) -> list[str]:
        for n in range(count):
            with Session(self.engine) as session, session.begin():
                session.add(Order(item=str(n)))
                self.producer.send(session, Message(TOPIC, {"n": n}, key=str(n)))
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(half_message.c.transaction_id).order_by(half_message.c.transaction_id))
            return [str(row[0]) for row in rows]

    def effects(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox)) or 0

    def wait_for_effects(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while self.effects() < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.effects() == count


def audited(spark: Any, shop: Shop, scratch: Path) -> tuple[Result, Any]:
    database = Database(shop.url, "shop")
    inputs = Inputs([database], [LogInput(shop.server.data_dir)])
    with contextlib.closing(database):
        return Audit(spark, PLAN, inputs, scratch).run(), inputs


def test_findings_are_mended_and_the_next_audit_is_clean(
    spark: Any, database_urls: dict[str, str], tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "3600"}).start()
    with empty_database("postgresql", database_urls, tmp_path) as url:
        shop = Shop(url, server)
        try:
            _mend(spark, shop, server, tmp_path)
        finally:
            shop.producer.close()
            shop.engine.dispose()
            server.stop()


def _mend(spark: Any, shop: Shop, server: ServerProcess, tmp_path: Path) -> None:
    import threading

    running = threading.Thread(target=shop.consumer.run, kwargs={"signals": False}, daemon=True)
    running.start()
    names = shop.order(30)
    shop.wait_for_effects(30)
    # In doubt: halves whose outcome nobody says. The database committed one, and knows nothing of the other.
    source = Database(shop.url)
    source_id = source.source_id()
    source.close()
    doubt = [ids.to_text(ids.new_id()) for _ in range(2)]
    message = {"topic": TOPIC, "body": "1"}

    def half(name: str) -> str:
        transaction = {"id": name, "messages": [message], "check_after": 3600}
        request = {"producer_group": "orders", "source": source_id, "transactions": [transaction]}
        return str(post(server, "/v1/transactions", request)["items"][0]["shard"])

    shard = half(doubt[0])
    half(doubt[1])
    row = {
        "message_no": 0, "producer_group": "orders", "mode": "half", "state": "COMMITTED", "shards": shard,
        "topic": TOPIC, "relayed": 1, "created_at": sa.text("clock_timestamp() AT TIME ZONE 'utc'"),
    }  # fmt: skip
    # Forced by somebody against what the database says.
    conflict = ids.to_text(ids.new_id())
    half(conflict)
    post(server, f"/v1/admin/transactions/{conflict}/rollback", {"reason": "a mistake"})
    # Lost: written as an outbox does, and no relay ever came.
    lost = ids.to_text(ids.new_id())
    outbox = row | {"mode": "outbox", "relayed": 0, "body": b'{"n": 99}', "key": "99", "shards": ""}
    with shop.engine.begin() as connection:
        for name in (doubt[0], conflict):
            connection.execute(half_message.insert().values(**row, transaction_id=name))
        connection.execute(half_message.insert().values(**outbox, transaction_id=lost))
        # Acknowledged, and the effect is gone.
        gone = [f"{name}.0" for name in names[:3]]
        connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id.in_(gone)))
    time.sleep(2.5)
    first, inputs = audited(spark, shop, tmp_path / "scratch")
    expected = {"IN_DOUBT": 2, "CONFLICT": 1, "LOST": 1, "ACKED_NO_EFFECT": 3}
    assert {k: v for k, v in first.counts.items() if v and k != "REDELIVERED"} == expected
    assert first.exit_code == 1

    before = actions(server)
    preview = asyncio.run(Repair(inputs, server.url, "a test", dry_run=True).run(first.found))
    assert len(preview) == 7 and all(item["dry_run"] for item in preview)
    assert actions(server) == before and shop.effects() == 27

    for expected_status in ({200, 201}, {200}):  # a repetition changes nothing
        done = asyncio.run(Repair(inputs, server.url, "a test").run(first.found))
        assert {item["status"] for item in done} <= expected_status, done
    inputs.databases[0].close()
    kinds = actions(server)
    assert {"transaction.commit", "transaction.rollback", "message.republish", "message.redeliver"} <= set(kinds)
    # The one in doubt that had committed, the conflict, the lost one, and three effects again.
    shop.wait_for_effects(27 + 1 + 1 + 1 + 3)
    time.sleep(2.5)
    second, _ = audited(spark, shop, tmp_path / "scratch")
    assert (second.verdict, second.exit_code) == ("PASS", 0), (second.counts, second.reasons)
    assert second.totals["repaired"] == 5
    shop.consumer.stop()
    running.join(20)
