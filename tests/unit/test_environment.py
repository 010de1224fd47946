"""Values of variables as secrets and files of variables give them: with a line feed, with quotation marks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from notify.client.transport.http import HttpClient
from notify.client.transport.login import tls_files_from_environment, token_from_environment
from notify.client.transport.servers import Servers
from notify.errors import InvalidRequest
from notify.server.settings import load
from notify.testing.forked import launch
from tests.support.clock import PATIENCE_SECONDS


def test_white_space_around_a_setting_is_none_of_it() -> None:
    settings = load(
        environ={
            "NOTIFY_HOST": "127.0.0.1\n",
            "NOTIFY_DATA_DIR": " /data\r\n",
            "NOTIFY_ACCESS": "true\n",
            "NOTIFY_WEBHOOK_SECRET": "s3cret\n",
        }
    )
    assert (settings.host, settings.data_dir, settings.access) == ("127.0.0.1", "/data", True)
    assert settings.webhook_secret == "s3cret"


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("name", ["HOST", "DATA_DIR", "PORT", "WEBHOOK_SECRET"])
def test_a_setting_in_quotation_marks_is_refused(name: str, quote: str) -> None:
    """A directory `"` was made where the server was started, and its messages were gone with the container."""
    with pytest.raises(InvalidRequest, match=f"NOTIFY_{name} .*quotation marks") as raised:
        load(environ={f"NOTIFY_{name}": f"{quote}v4lue{quote}"})
    assert "v4lue" not in str(raised.value), "it may be a secret"


def test_the_port_of_a_service_of_kubernetes_is_explained() -> None:
    environ = {"NOTIFY_PORT": "tcp://10.96.0.1:7400"}
    with pytest.raises(InvalidRequest, match=r"enableServiceLinks: false"):
        load(environ=environ)
    assert load({"port": 7401, "host": None}, environ=environ).port == 7401, "a flag goes first"


def test_a_client_reads_them_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    monkeypatch.setenv("NOTIFY_TOKEN_FILE", f"{tmp_path}/token\n")
    monkeypatch.setenv("NOTIFY_ROOM", "a\n")
    assert token_from_environment() == "t0ken"
    assert Servers("http://127.0.0.1:1", "queue")._room == "a"
    monkeypatch.setenv("NOTIFY_TOKEN", '"t0ken"')
    with pytest.raises(InvalidRequest, match=r"NOTIFY_TOKEN .*quotation marks"):
        HttpClient("http://127.0.0.1:1")
    monkeypatch.setenv("NOTIFY_CA", f"{tmp_path}/missing.pem\n")
    with pytest.raises(InvalidRequest, match=r"missing\.pem\)"):
        tls_files_from_environment()


def test_a_command_reads_them_in_the_same_way(tmp_path: Path) -> None:
    """The line feed of a secret became a part of the database's name."""
    process = launch(
        ["purge", "--older-than", "40", "--url", "http://127.0.0.1:1"],
        os.environ | {"NOTIFY_DSN": f"sqlite:///{tmp_path}/shop.db\n"},
    )
    assert process.stdout is not None
    with process.stdout:
        process.stdout.read()
    assert process.wait(PATIENCE_SECONDS) == 2, "it has no tables"
    assert [path.name for path in tmp_path.iterdir()] == ["shop.db"]
