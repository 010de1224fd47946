"""The pipeline of docs/lakehouse.md, as it stands there; and killed at random, as a campaign."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from notify.errors import NotifyError
from notify.object_store.store import Store
from notify.spark.tables import manifest as manifests
from notify.spark.tables.reading import files_of, read_file
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import admin, call
from tests.support.streams import CONNECTS

TOPIC = "order.placed"
PAGE = Path(__file__).parents[2] / "docs" / "lakehouse.md"
ROUNDS = 4
"""Kills of the reader in the campaign."""


def blocks() -> list[str]:
    """The page's code, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def pipeline() -> str:
    """The code of the page's first block."""
    return blocks()[0]


def order(server: str, numbers: range) -> None:
    bodies = [json.dumps({"item": f"book {n}", "amount": 9.5, "gift": n % 2 == 0}) for n in numbers]
    messages = [{"topic": TOPIC, "key": f"k{n % 7}", "body": body} for n, body in zip(numbers, bodies, strict=True)]
    call(server, "POST", "/v1/messages", {"messages": messages})


def rows(url: str) -> list[dict[str, Any]]:
    return [row for file in files_of(url) for row in read_file(Store(url), file).to_pylist()]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data").start()
    admin(server.url, "PUT", f"topics/{TOPIC}", {"queues": 3})
    yield server
    server.stop()


@pytest.mark.long
def test_the_code_of_the_page(
    spark: Any,
    own_server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {"url": own_server.url}
    environment = {"NOTIFY_URL": own_server.url, "LAKE": f"file://{tmp_path}/lake", "CHECKPOINT": f"{tmp_path}/to"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    order(own_server.url, range(20))
    for attempt in range(CONNECTS):
        try:
            exec(compile(pipeline(), str(PAGE), "exec"), names)
            break
        except Exception as error:
            if "failed to connect back" not in str(error) or attempt == CONNECTS - 1:
                raise
    table = rows(environment["LAKE"])
    assert sorted(row["value"]["item"] for row in table) == sorted(f"book {n}" for n in range(20))
    assert all(row["value"]["amount"] == Decimal("9.50") for row in table)
    assert {row["rescued"] for row in table} == {'{"gift":true}', '{"gift":false}'}
    _, look, read = blocks()
    exec(compile(look, str(PAGE), "exec"), names)
    assert names["orders"].count() == 20
    assert "| k0|" in capsys.readouterr().out
    lake = environment["LAKE"]
    assert "s3://lake/orders" in read
    exec(compile(read.replace("s3://lake/orders", lake), str(PAGE), "exec"), names)
    assert names["spark"].read.format("notify_table").load(lake).count() == 20
    assert all(url.endswith(".parquet") for url in names["urls_of"](lake))


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_every_message_once_beside_kills_of_reader_server_and_store(own_server: ServerProcess, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    (tmp_path / "table").mkdir()
    (tmp_path / "no directory").write_text("")
    point(lake, tmp_path / "table")
    reader = Reader(tmp_path, own_server.url, lake)
    sending = Sending(own_server.url)
    chance = random.Random(20)
    with contextlib.closing(reader), contextlib.closing(sending):
        for _ in range(ROUNDS):
            before = rows_of(lake)
            reader.start()
            eventually(lambda before=before: reader.is_over or rows_of(lake) > before, "a micro-batch", 900)
            if chance.random() < 0.5:
                own_server.kill()
                own_server.start()
            if chance.random() < 0.5:
                point(lake, tmp_path / "no directory")
                time.sleep(chance.random())  # the store is unreachable for a moment: every request to it fails
                point(lake, tmp_path / "table")
            time.sleep(chance.random() * 3)  # the kill comes at any moment of a micro-batch
            reader.kill()
        sending.close()
        for _ in range(CONNECTS):
            reader.start()
            if reader.wait() == 0:
                break
        else:
            raise AssertionError("the reader came to no end")
    table = rows(f"file://{lake}")
    stored = everything(own_server.url)
    assert len(stored) >= sending.acknowledged > 0
    assert sorted(row["id"] for row in table) == sorted(stored)
    assert reader.kills > 0


def point(link: Path, target: Path) -> None:
    """Have a path lead elsewhere, at once."""
    new = link.with_name("new link")
    new.symlink_to(target)
    os.replace(new, link)


def rows_of(lake: Path) -> int:
    try:
        return manifests.load(Store(f"file://{lake}")).rows
    except NotifyError:
        return 0  # it is unreachable


def everything(server: str) -> list[str]:
    """The ids of the topic's messages, as the server has them."""
    ids: list[str] = []
    for queue in call(server, "GET", f"/v1/topics/{TOPIC}")["queues"]:
        at = queue["start"]
        while at < queue["end"]:
            path = f"/v1/topics/{TOPIC}/queues/{queue['queue']}/messages?offset={at}&max=1000"
            pulled = call(server, "GET", path)
            ids += [message["id"] for message in pulled["messages"]]
            at = pulled["next_offset"]
    return ids


class Reader:
    """The page's pipeline as processes of its own: Python, the JVM, and its workers."""

    def __init__(self, directory: Path, server: str, lake: Path) -> None:
        self._script = directory / "pipeline.py"
        self._script.write_text(pipeline())
        self._environment = os.environ | {
            "NOTIFY_URL": server, "LAKE": f"file://{lake}", "CHECKPOINT": str(directory / "checkpoint"),
            "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false --driver-java-options=-XX:TieredStopAtLevel=1 "
            "pyspark-shell",
        }  # fmt: skip
        self._log = (directory / "reader.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(self._script)], env=self._environment, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def close(self) -> None:
        """Leave nothing behind."""
        if self._process is not None:
            self.kill()
        self._log.close()

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        assert self._process is not None
        if not self.is_over:
            self.kills += 1
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(1800)


class Sending:
    """Sends orders all the time, in a thread."""

    def __init__(self, server: str) -> None:
        self.acknowledged = 0
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            with contextlib.suppress(OSError, AssertionError):  # the server is being killed
                order(self._server, range(self.acknowledged, self.acknowledged + 20))
                self.acknowledged += 20

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
