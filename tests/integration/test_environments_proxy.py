"""Proxies that the environment names, as in an office: Notify's own servers are reached without them."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from notify.client import Message, TransactionProducer
from notify.runtime.direct import open_directly
from notify.runtime.timed_call import answer_to
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.answering import answering, reply
from tests.support.commands import cli
from tests.support.stranger import PAGES, Stranger


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that does not answer, and no exception for this machine."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def local() -> Iterator[str]:
    """The address of a server of another program on this machine."""
    with answering(lambda request: reply(request, b"here")) as server:
        yield f"{server.url}/"


@pytest.mark.usefixtures("office")
def test_a_server_is_reached_without_the_environments_proxy(tmp_path: Path, unique: str) -> None:
    """The test kit's server never became ready, and a backup, alone of all commands, failed."""
    server = ServerProcess(tmp_path / "data").start(60)
    try:
        with TransactionProducer(server.url, group=unique) as producer:
            producer.publish(Message(unique, "1"))
        code, shown = cli("backup", str(tmp_path / "backup"), "--reason", "x", "--url", server.url, "--json")
        assert code == 0 and shown["files"] > 0, shown
    finally:
        server.stop()


@pytest.mark.usefixtures("office")
def test_this_machine_is_called_without_a_proxy(local: str) -> None:
    assert answer_to(local, 10, 100) == b"here"
    with pytest.raises(OSError):
        answer_to("http://receiver.invalid/", 10, 100)


def test_a_redirect_takes_no_token_along(local: str) -> None:
    with_redirect = PAGES["302"].replace(b"https://login.example/", local.encode())
    between = Stranger(local)
    try:
        between.answer(with_redirect, times=None)
        with pytest.raises(urllib.error.HTTPError, match="302"):
            open_directly(between.url + "/v1/admin/backups/1/files/a", 10)
    finally:
        between.close()
