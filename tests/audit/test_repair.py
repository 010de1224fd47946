"""Repairs through a real server's admin routes: previewed, recorded, repeatable; the next audit has no finding."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.client.table import half_message, notify_inbox
from notify.spark.audit import Audit
from notify.spark.databases import Database
from notify.spark.log_input import LogInput
from notify.spark.repair import Repair
from notify.spark.result import Inputs, Result
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, wait_until_closed
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import lag, running
from tests.support.http import admin, post
from tests.support.transactions import new_id


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that sends no checks, so that transactions stay in doubt."""
    process = ServerProcess(tmp_path / "data", environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "3600"}).start()
    yield process
    process.stop()


@pytest.fixture
def shop(database_urls: dict[str, str], server: ServerProcess, tmp_path: Path) -> Iterator[Shop]:
    with (
        empty_database("postgresql", database_urls, tmp_path) as url,
        contextlib.closing(Shop(url, server.url)) as shop,
    ):
        yield shop


@contextlib.contextmanager
def opened(shop: Shop, server: ServerProcess) -> Iterator[Inputs]:
    with contextlib.closing(Database(shop.url, "shop")) as database:
        yield Inputs([database], [LogInput(server.data_dir)])


def audited(spark: Any, inputs: Inputs, scratch: Path) -> Result:
    """An audit for which all earlier transactions are closed."""
    wait_until_closed(inputs.databases[0], AT_ONCE)
    return Audit(spark, AT_ONCE, inputs, scratch).run()


def half(server: ServerProcess, transaction_id: str, source: str) -> str:
    """Store a half without an outcome; return its shard."""
    message = {"topic": TOPIC, "body": "1"}
    transaction = {"id": transaction_id, "messages": [message], "check_after": 3600}
    request = {"producer_group": "orders", "source": source, "transactions": [transaction]}
    return str(post(server.url, "/v1/transactions", request)["items"][0]["shard"])


def actions(server: ServerProcess) -> list[str]:
    return [row["what"] for row in admin(server.url, "GET", "actions")["actions"]]


def test_findings_are_mended_and_the_next_audit_is_clean(
    spark: Any, server: ServerProcess, shop: Shop, tmp_path: Path
) -> None:
    with running(shop.consumer):
        for _ in range(30):
            shop.order()
        eventually(lambda: len(shop.effects()) == 30 and lag(server.url, "points") == 0, "30 effects, acknowledged")
        plant_faults(shop, server)
        with opened(shop, server) as inputs:
            first = audited(spark, inputs, tmp_path / "scratch")
            expected = {"IN_DOUBT": 2, "CONFLICT": 1, "LOST": 1, "ACKED_NO_EFFECT": 3}
            assert {k: v for k, v in first.counts.items() if v and k != "REDELIVERED"} == expected
            assert first.exit_code == 1

            before = actions(server)
            preview = asyncio.run(Repair(inputs, server.url, "a test", dry_run=True).run(first.found))
            assert len(preview) == 7 and all(item["dry_run"] for item in preview)
            assert actions(server) == before and len(shop.effects()) == 27

            for expected_status in ({200, 201}, {200}):  # a repetition changes nothing
                done = asyncio.run(Repair(inputs, server.url, "a test").run(first.found))
                assert {item["status"] for item in done} <= expected_status, done
        kinds = actions(server)
        assert {"transaction.commit", "transaction.rollback", "message.republish", "message.redeliver"} <= set(kinds)
        # The committed one in doubt, the conflict, the lost one, and three repeated effects, each with an inbox row for
        # its new id and one for its first id.
        mended = 27 + 1 + 1 + 1 + 3 * 2
        eventually(lambda: len(shop.effects()) == mended and lag(server.url, "points") == 0, "the effects of these")
        with opened(shop, server) as inputs:
            second = audited(spark, inputs, tmp_path / "scratch")
        assert (second.verdict, second.exit_code) == ("PASS", 0), (second.counts, second.reasons)
        assert second.totals["repaired"] == 2, "the other three have effects under their own ids"


def plant_faults(shop: Shop, server: ServerProcess) -> None:
    consumed = sorted(shop.transactions())
    with contextlib.closing(Database(shop.url)) as database:
        source = database.source_id()
    # In doubt: the database committed one, and has no row of the other.
    doubt, unknown, conflict, lost = (new_id() for _ in range(4))
    shard = half(server, doubt, source)
    half(server, unknown, source)
    # Conflict: an operator forced the outcome against the database.
    half(server, conflict, source)
    admin(server.url, "POST", f"transactions/{conflict}/rollback", {})
    with shop.engine.begin() as connection:
        for name in (doubt, conflict):
            connection.execute(half_message.insert().values(shop.row(name, shards=shard)))
        # Lost: an outbox row that no relay moved.
        outbox = shop.row(lost, mode="outbox", relayed=0, body=b'{"n": 99}', key="99")
        connection.execute(half_message.insert().values(outbox))
        # Acknowledged, but the effect was deleted.
        gone = [f"{name}.0" for name in consumed[:3]]
        connection.execute(notify_inbox.delete().where(notify_inbox.c.message_id.in_(gone)))
