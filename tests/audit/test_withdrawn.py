"""An audit of a log in which delayed messages were cancelled and replaced: it counts them, and misses none of them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from notify.client import Message
from notify.spark.inputs.databases import Database
from notify.testing.process import ServerProcess
from tests.audit.audited import AT_ONCE, audited, wait_until_closed
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.groups import running
from tests.support.withdrawals import withdraw_some


@pytest.mark.long
def test_withdrawn_messages_are_counted(spark: Any, server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    """Also after a restart, whose checkpoint and new segment part a withdrawal from the message that it withdraws."""
    withdrawn = withdraw_some(shop.producer, shop.engine, TOPIC, lambda: None)
    server.kill()
    server.start()
    withdrawn |= withdraw_some(shop.producer, shop.engine, TOPIC, lambda: None)
    with running(shop.consumer):
        eventually(lambda: len(shop.effects()) == 4, "the effects of what was kept and of what replaced others")
    with contextlib.closing(Database(shop.url, "shop")) as database:
        wait_until_closed(database, AT_ONCE)
    result = audited(spark, shop.url, tmp_path / "data", tmp_path / "scratch", AT_ONCE)
    assert (result.verdict, {name: count for name, count in result.counts.items() if count}) == (
        "PASS", {"WITHDRAWN": len(withdrawn)},
    )  # fmt: skip
    assert len(withdrawn) == 4

    # A message that was never sent is missed beside them.
    lost = shop.lose()
    with contextlib.closing(Database(shop.url, "shop")) as database:
        wait_until_closed(database, AT_ONCE)
    result = audited(spark, shop.url, tmp_path / "data", tmp_path / "scratch", AT_ONCE)
    assert result.counts["LOST"] == 1 and result.counts["WITHDRAWN"] == 4
    assert lost in {case.message_id for case in result.found}


def test_explain_tells_of_a_collapsed_message(server: ServerProcess, shop: Shop, tmp_path: Path) -> None:
    """It was called a withdrawal of another message, which its sender never made."""
    sent = []
    for _ in range(2):
        with Session(shop.engine) as session, session.begin():
            sent.append(shop.producer.send(session, Message(TOPIC, {}, dedupe="k", within=3600)).id)
        assert shop.producer.flush(PATIENCE_SECONDS) == []
    inputs = ("--database", shop.url, "--log", str(tmp_path / "data"), "--report", str(tmp_path / "report"))
    code, said = cli("audit", "explain", sent[1], *inputs)
    assert "collapsed" in said["text"] and "LOST" not in said["text"], (code, said["text"])
