"""A primary is lost with transactions that its replica did not have: the audit names the messages that went out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.errors import Purged
from notify.spark.inputs.databases import Database
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, audited, found, wait_until_closed
from tests.support.bridges import move, outbox
from tests.support.databases import own_mysql


@pytest.mark.long
def test_messages_of_transactions_that_a_failover_lost_are_ghosts(spark: Any, tmp_path: Path) -> None:
    queue = ServerProcess(tmp_path / "queue").start()
    with contextlib.ExitStack() as stack:
        stack.callback(queue.stop)
        first, second = stack.enter_context(own_mysql()), stack.enter_context(own_mysql(["--server-id=2"]))
        first.execute("CREATE DATABASE orders CHARACTER SET utf8mb4")
        old, new = (_url(server.url, "orders") for server in (first, second))
        second.follow(first)
        outbox(old, "placed", range(2))
        kept = _messages(old)
        second.wait_until_it_has(first.gtids)
        second.execute("STOP REPLICA")
        outbox(old, "placed", range(4, 6))
        lost = _messages(old) - kept
        move(old, queue)
        first.kill()
        second.promote()
        outbox(new, "placed", range(8, 10))
        with pytest.raises(Purged):
            move(new, queue)
        move(new, queue, fill=True)
        with contextlib.closing(Database(new, "shop")) as database:
            wait_until_closed(database, AT_ONCE)
        result = audited(spark, new, tmp_path / "queue", tmp_path / "scratch", AT_ONCE)
    assert len(lost) == 2 and found(result) == {"GHOST": lost}


def _url(url: str, database: str) -> str:
    return sa.make_url(url).set(database=database).render_as_string(hide_password=False)


def _messages(url: str) -> set[str]:
    """The ids of a service's messages."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT transaction_id, message_no FROM half_message").all()
    engine.dispose()
    return {f"{transaction}.{number}" for transaction, number in rows}
