"""Administrators' writes on running servers: the log and the records say what left groups unsettled, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.client import create_tables
from notify.errors import InvalidRequest
from notify.protocol.workers import worker_names
from notify.server.configuration.records import Records
from notify.server.database import open_database
from notify.spark.explain.explained import explain
from notify.spark.inputs.actions import place_of_records, recorded
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs
from notify.storage.sql import administration
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import ask
from tests.support.servers import stop_if_running
from tests.support.shop import make_engine

ANN = {"x-notify-user": "ann"}
GROUP = "points"
ACTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reset": ("POST", f"groups/{GROUP}/reset", {"topic": "reset", "to": "latest"}),
    "unsubscribed": ("DELETE", f"groups/{GROUP}/subscriptions/unsubscribed", {}),
    "deleted": ("DELETE", "topics/deleted", {}),
    "purged": ("POST", "topics/purged/purge", {"before": "latest", "force": True}),
}
"""By topic, the write that makes its messages leave the group's queue."""


@pytest.fixture(params=[1, 2])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ServerProcess, list[Path]]]:
    """A server, or the workers of one, and the directories of their logs."""
    several = request.param > 1
    process = ServerProcess(tmp_path / "data", flags=["--workers", "2"] if several else []).start()
    directories = [process.data_dir / name for name in worker_names(2)] if several else [process.data_dir]
    yield process, directories
    stop_if_running(process)


def done(url: str, method: str, path: str, **body: Any) -> None:
    """An administrator's write, with her name and a reason that names the path."""
    sent = {"reason": f"typed {path}", **body}
    status, answer = ask(url, method, f"/v1/admin/{path}", sent, headers=ANN)
    assert status == 200, answer


@pytest.mark.long
def test_each_action_is_told_from_the_log_and_its_records(
    logs: tuple[ServerProcess, list[Path]], tmp_path: Path
) -> None:
    server, directories = logs
    caller = Caller(server.url, GROUP, "i")
    names: dict[str, list[str]] = {}
    for topic, (method, path, body) in ACTIONS.items():
        subscribe(server.url, GROUP, topic)
        publish(server.url, topic, ["settled"])
        names[topic] = []
        publish(server.url, topic, ["a", "b"])
        messages: list[dict[str, Any]] = []
        eventually(lambda m=messages, t=topic: m.extend(caller.receive(t)) or len(m) == 3, f"the messages of {topic}")
        for message in messages:
            if message["body"] == "settled":
                assert caller.settle([message]) == [200]
                settled = message["id"]
            else:
                names[topic].append(message["id"])
        done(server.url, method, path, **body)
        names[topic].append(settled)
    server.stop()
    engine = make_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    engine.dispose()
    with contextlib.closing(Database(f"sqlite:///{tmp_path}/shop.db", "shop")) as database:
        inputs = Inputs([database], [LogInput(directory, directory.name) for directory in directories])
        for topic, (_, path, _) in ACTIONS.items():
            *left, settled = names[topic]
            for message_id in left:
                sentence = explain(inputs, message_id, tmp_path / "scratch").sentence
                assert f"LEFT_OUT: {GROUP} never settled it" in sentence, (topic, sentence)
                assert f"by ann: typed {path}" in sentence, (topic, sentence)
            assert "LEFT_OUT" not in explain(inputs, settled, tmp_path / "scratch").sentence


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_records_of_a_registry_and_of_a_data_directory_are_read(
    kind: str, database_urls: dict[str, str], tmp_path: Path
) -> None:
    """Servers with a registry record in its database; those over Kafka or SQL without one in their data directory."""
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = make_engine(url)
        administration.metadata.create_all(engine)
        Records(engine).record(1, "ann", "group.reset", "points/orders", "a typo", {})
        engine.dispose()
        own = open_database(str(tmp_path))
        Records(own).record(2, "bob", "topic.delete", "orders", "not needed", {})
        own.dispose()
        everything = administration.server_action.c.at_us > 0
        records = recorded(Inputs(records=[place_of_records(url), place_of_records(str(tmp_path))]), everything, 10)
        assert [record.by for record in records] == ["by ann: a typo", "by bob: not needed"]
    with pytest.raises(InvalidRequest, match=r"there is no admin\.db; name the --data-dir of a server"):
        place_of_records(str(tmp_path / "elsewhere"))
