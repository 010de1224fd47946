"""A deleted or renamed inbox row shows, whatever way its message came to the group."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import Consumer, Inbox
from notify.client.tables.definitions import notify_inbox
from notify.errors import DeadLetter
from notify.spark.audit import Audit
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.repairing import opened
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.groups import lag, publish, redrive, running
from tests.support.http import admin, post


@pytest.mark.long
def test_each_row_that_is_gone_is_named(spark: Any, server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    mended, tried = threading.Event(), set[str]()
    letters: set[str] = set()
    consumer = Consumer(server.url, group="points", inbox=Inbox(shop.engine))

    @consumer.subscribe(TOPIC, start="earliest", retry_min=0.1)
    def handle(message: Any, session: Any) -> None:
        body = str(message.body)
        if "letter" in body and not mended.is_set():
            letters.add(message.id)
            raise DeadLetter("no such customer")
        if "again" in body and message.first_id not in tried:
            tried.add(message.first_id)
            raise RuntimeError("not yet")

    mail = Consumer(server.url, group="mail", inbox=Inbox(shop.engine))
    mail.subscribe(TOPIC, start="earliest")(lambda message, session: None)

    def rows() -> set[tuple[str, str]]:
        with shop.engine.connect() as connection:
            columns = notify_inbox.c
            return {
                (str(g), str(m)) for g, m in connection.execute(sa.select(columns.consumer_group, columns.message_id))
            }

    with running(consumer, mail, subscribed=True):
        shop.order()
        publish(server.url, TOPIC, ["published", "letter", "again"])
        post(server.url, "/v1/messages", {"messages": [{"topic": TOPIC, "body": "delayed", "delay": 0.2}]})
        eventually(lambda: admin(server.url, "GET", "groups/points/dead-letters")["messages"], "a dead letter")
        mended.set()
        redrive(server.url, "points", all=True)
        # Five to mail, five to points, and the redriven letter, which has a row for its first id, too.
        eventually(
            lambda: len(rows()) == 11 and lag(server.url, "points") == lag(server.url, "mail") == 0, "all effects"
        )
    gone = rows()
    with shop.engine.begin() as connection:
        of_mail = notify_inbox.c.consumer_group == "mail"
        connection.execute(notify_inbox.update().where(of_mail).values(consumer_group="elsewhere"))
        of_points = sa.literal_column("message_id") + "0"  # .00 is another number than any SDK writes
        connection.execute(
            notify_inbox.update().where(notify_inbox.c.consumer_group == "points").values(message_id=of_points)
        )
        for group in ("points", "mail"):  # no inbox is empty
            row = {"consumer_group": group, "message_id": "0.0", "created_at": sa.func.now()}
            connection.execute(notify_inbox.insert().values(row))
    with opened(shop, server) as inputs:
        wait_until_closed(inputs.databases[0], AT_ONCE)
        result = Audit(spark, AT_ONCE, inputs, tmp_path / "scratch").run()
    named = {(group, f.message_id) for f in result.found if f.finding == "ACKED_NO_EFFECT" for group in f.groups}
    malformed = {f.evidence["id"] for f in result.found if f.finding == "MALFORMED"}
    assert named == {(group, message) for group, message in gone if group == "mail"}
    # A row of another number counts as its message's effect, as one in capital letters does, and is named.
    assert malformed == {"0.0", *(f"{message}0" for group, message in gone if group == "points")}
    assert result.verdict == "FINDINGS" and len(letters) == 1
