"""Each planted fault is explained with the class that an audit gives it, and sound transactions with none."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.client import Message, TransactionProducer, create_tables
from notify.protocol import ids
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs
from notify.testing.process import ServerProcess
from tests.audit.campaign import planted
from tests.support.clock import eventually
from tests.support.http import ask, call
from tools.bench.made_run import made_run

ELSEWHERE = {"DISORDER", "CORRUPT", "BRIDGE_GAP", "DUP_EFFECT", "UNGUARDED"}
"""They need more than one transaction, or the query of --effects."""
EACH = 2


@pytest.mark.long
def test_a_message_of_a_schedule_is_explained_by_it(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    server = ServerProcess(tmp_path / "data").start()
    try:
        with TransactionProducer(server.url, group="shop") as producer:
            producer.schedule("beat", Message("t", "x"), every=1)
        pulled = "/v1/topics/t/queues/0/messages"
        eventually(lambda: ask(server.url, "GET", pulled)[1].get("messages"), "a message")
        message = call(server.url, "GET", pulled)["messages"][0]
    finally:
        server.stop()
    with contextlib.closing(Database(str(engine.url), "shop")) as database:
        known = explain(Inputs([database], [LogInput(tmp_path / "data")]), message["id"], tmp_path / "scratch", (5, 5))
    events = [event.what for event in known.events]
    assert f"message 0 sent by schedule beat for {message['headers']['notify-scheduled-for']}" in events
    assert known.exit_code == 0 and known.verdicts[0].finding == "", known.sentence


@pytest.mark.long
def test_planted_faults_are_explained_with_their_class(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    made = made_run(tmp_path, url, 600, segment_bytes=48 << 10)
    wanted = planted(made, url, tmp_path / "faulty", EACH)
    harmed = {name for several in wanted.ids.values() for name in several}
    wrong = []
    with contextlib.closing(Database(url, "shop")) as database:
        inputs = Inputs([database], [LogInput(tmp_path / "faulty")])
        for name, several in wanted.ids.items():
            for message_id in sorted(several) if name not in ELSEWHERE else ():
                try:
                    ids.parse_message_id(message_id)
                except ValueError:
                    continue  # a row without an id cannot be asked for
                known = explain(inputs, message_id, tmp_path / "scratch", (5, 5))
                if not any(name in (v.finding, *v.others) for v in known.verdicts):
                    wrong.append((name, known.sentence))
        sound = [n for n in range(0, 600, 29) if f"{ids.to_text(made.id(n))}.0" not in harmed]
        for n in sound:
            known = explain(inputs, ids.to_text(made.id(n)), tmp_path / "scratch", (5, 5))
            if known.exit_code or known.verdicts[0].finding not in ("", "REDELIVERED"):
                wrong.append(("", known.sentence))
    assert wrong == []
