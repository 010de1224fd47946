"""A server that ships its log: to a directory and to S3, through kills, and past a store that hangs or refuses."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notify.errors import Unavailable
from notify.object_store.store import Store
from notify.storage.shipped import manifest
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import admin, ask, post
from tests.support.object_store import S3Server, bodies, listed, s3_server, untrue
from tests.support.servers import stop_if_running

EVERY = ["--ship-every", "1"]
SHIPPING_SECONDS = 240.0
"""The longest wait for the process that ships: its imports take seconds, and it goes behind all others."""


def serving(tmp_path: Path, url: str, **environment: str) -> ServerProcess:
    return ServerProcess(tmp_path / "data", environment=environment, flags=["--ship-to", url, *EVERY])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that ships to the directory `store`, not started yet."""
    process = serving(tmp_path, f"file://{tmp_path}/store")
    yield process
    stop_if_running(process)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def publish(server: ServerProcess, *texts: str) -> None:
    items = post(server.url, "/v1/messages", {"messages": [{"topic": "t", "body": text} for text in texts]})["items"]
    assert [item["status"] for item in items] == [201] * len(texts)


def shipping(server: ServerProcess) -> dict[str, Any]:
    shown: dict[str, Any] = admin(server.url, "GET", "overview")["shipping"]
    return shown


def alarms(server: ServerProcess) -> list[str]:
    return [alarm["text"] for alarm in admin(server.url, "GET", "overview")["alarms"] if alarm["name"] == "shipping"]


def until_shipped(server: ServerProcess) -> None:
    nothing = {"segments": 0, "bytes": 0, "seconds": 0.0}
    shown: dict[str, Any] = {}

    def is_shipped() -> bool:
        shown.update(shipping(server))
        return bool(shown["behind"] == nothing)

    try:
        eventually(is_shipped, "all to be shipped", SHIPPING_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}; {shown}; {server.output[-20:]}") from None


@pytest.mark.long
def test_shipping_survives_kills(server: ServerProcess, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    server.start()
    publish(server, "1", "2")
    until_shipped(server)
    assert bodies(url, tmp_path) == [b"1", b"2"]
    server.kill()
    server.start()
    publish(server, "3")
    server.kill()
    server.start()
    until_shipped(server)
    assert bodies(url, tmp_path) == [b"1", b"2", b"3"] and untrue(url) == []
    shown = shipping(server)
    assert shown["to"] == url and shown["listed_segments"] >= 2 and shown["shipped_at"]
    assert shown["failing"] is None and shown["refused"] is None and alarms(server) == []
    _, metrics = ask(server.url, "GET", "/metrics")
    assert "notify_shipping_behind_bytes 0.0" in metrics and "notify_shipping_failures_total 0.0" in metrics
    assert ">Shipping<" in ask(server.url, "GET", "/")[1]


@pytest.mark.long
def test_the_administrators_records_are_shipped(server: ServerProcess, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    server.start()
    admin(server.url, "PUT", "settings", {"values": {"alarm_parked": 7}})
    publish(server, "1")
    until_shipped(server)
    found = listed(url)
    assert found is not None and found.records is not None
    copy = tmp_path / "records.db"
    with copy.open("wb") as file:
        assert Store(url).copy_to(found.records.name, file, 1 << 30) == (
            found.records.object.size,
            found.records.object.sha256,
        )
    with contextlib.closing(sqlite3.connect(copy)) as database:
        assert any("alarm_parked" in str(row) for row in database.iterdump())


@pytest.mark.long
def test_messages_stored_before_shipping_was_on_are_shipped(tmp_path: Path) -> None:
    plain = ServerProcess(tmp_path / "data").start()
    publish(plain, "1")
    assert admin(plain.url, "GET", "overview")["shipping"] is None
    plain.stop()
    url = f"file://{tmp_path}/store"
    server = serving(tmp_path, url).start()
    try:
        until_shipped(server)
        assert bodies(url, tmp_path) == [b"1"]
    finally:
        server.stop()


@pytest.mark.long
def test_a_store_of_another_log_is_refused_at_the_start(server: ServerProcess, tmp_path: Path) -> None:
    server.start()
    publish(server, "1")
    until_shipped(server)
    other = ServerProcess(tmp_path / "other", flags=["--ship-to", f"file://{tmp_path}/store"])
    with pytest.raises(Unavailable, match="holds another log"):
        other.start()
    assert bodies(f"file://{tmp_path}/store", tmp_path) == [b"1"]


@pytest.mark.long
@pytest.mark.parametrize("url", ["relative/path", "nope://x", "s3://key:secret@bucket"])
def test_a_server_does_not_start_with_a_wrong_url_of_its_store(url: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="setting ship_to: ") as raised:
        serving(tmp_path, url).start()
    assert "secret" not in str(raised.value)


@pytest.mark.long
def test_a_server_that_was_restored_elsewhere_stops_shipping(server: ServerProcess, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    server.start()
    publish(server, "1")
    until_shipped(server)
    there = listed(url)
    assert there is not None
    manifest.replace(Store(url), msgspec.structs.replace(there, generation=2))
    publish(server, "2")
    eventually(lambda: alarms(server), "the alarm of a server that was superseded", SHIPPING_SECONDS)
    assert "generation 2" in alarms(server)[0]
    server.stop()
    server.start()  # it serves, and says so again
    publish(server, "3")
    eventually(lambda: alarms(server), "the alarm after another start", SHIPPING_SECONDS)
    assert bodies(url, tmp_path) == [b"1"]


@pytest.mark.long
def test_the_process_that_ships_is_started_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    server = serving(tmp_path, url, NOTIFY_CRASH_AT="ship.after_manifest:1").start()
    try:
        publish(server, "1")
        until_shipped(server)
        publish(server, "2")
        until_shipped(server)
        assert bodies(url, tmp_path) == [b"1", b"2"] and untrue(url) == []
        assert shipping(server)["failures"] >= 1
    finally:
        server.stop()


@pytest.mark.long
def test_s3_that_refuses_and_hangs_is_outlived(s3: S3Server, tmp_path: Path) -> None:
    server = serving(tmp_path, s3.url, NOTIFY_ALARM_SHIPPING_SECONDS="1", NOTIFY_ALARM_EVERY_SECONDS="0.2").start()
    try:
        publish(server, "1")
        until_shipped(server)
        s3.refuse(after=0)
        publish(server, "2")
        eventually(lambda: shipping(server)["failing"], "a try that is refused", SHIPPING_SECONDS)
        eventually(lambda: "PermissionError" in (shipping(server)["failing"] or ""), "the reason")
        eventually(lambda: alarms(server), "an alarm", SHIPPING_SECONDS)
        s3.refuse(after=1_000_000)
        until_shipped(server)
        s3.hang()
        publish(server, "3")
        eventually(lambda: alarms(server), "an alarm of a store that hangs", SHIPPING_SECONDS)
        publish(server, "4")
        assert shipping(server)["behind"]["bytes"] > 0
        s3.go_on()
        until_shipped(server)
        assert bodies(s3.url, tmp_path) == [b"1", b"2", b"3", b"4"] and untrue(s3.url) == []
        eventually(lambda: not alarms(server), "the alarm to be cleared")
    finally:
        s3.go_on()
        s3.refuse(after=1_000_000)
        server.stop()


@pytest.mark.long
def test_a_store_that_cannot_be_written_raises_an_alarm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    url = f"file://{tmp_path}/file/store"
    server = serving(tmp_path, url, NOTIFY_ALARM_SHIPPING_SECONDS="0.5", NOTIFY_ALARM_EVERY_SECONDS="0.2").start()
    try:
        publish(server, "1")
        eventually(lambda: alarms(server), "an alarm", SHIPPING_SECONDS)
        assert "NotADirectory" in shipping(server)["failing"]
        (tmp_path / "file").unlink()
        until_shipped(server)
    finally:
        server.stop()
