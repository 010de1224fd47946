"""The examples of the documentation, run as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from notify.bench.server import ServerProcess
from notify.testing import InMemoryServer

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code of a page, fence by fence."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, where: Path, **names: Any) -> dict[str, Any]:
    before = os.getcwd()
    os.chdir(where)
    try:
        exec(compile(code, "a page of the documentation", "exec"), names)
    finally:
        os.chdir(before)
    return names


def test_a_service_is_tested(tmp_path: Path) -> None:
    first, typed = blocks("testing.md", "python")
    run(first, tmp_path)["engine"].dispose()
    names = run(typed, tmp_path)
    from notify.message import ReceivedMessage

    received = ReceivedMessage("i", "t", 0, 0, b'{"item": "book", "price": 7}', None, None, {}, 1, "")
    assert names["on_placed"](received) == 7


def test_a_fastapi_service(notify_server: InMemoryServer, tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    (code,) = blocks("frameworks.md", "python")
    names = run(code, tmp_path, NOTIFY_URL=notify_server.url)
    with TestClient(names["app"]) as client:
        assert client.post("/orders?item=book").json() == {"ordered": "book"}
        (message,) = notify_server.wait_for("order.placed", 1)
        assert message.json() == {"item": "book"}
        # A refused half is seen by the client: the order was not placed.
        with notify_server.down(), pytest.raises(Exception, match="nothing is committed"):
            client.post("/orders?item=pen")
    names["engine"].dispose()


def test_with_curl_alone(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    server = ServerProcess(tmp_path / "data").start()
    try:
        (script,) = blocks("http.md", "bash")
        script = script.replace("http://127.0.0.1:7400", server.url)
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert '"body":"a book"' in done.stdout and '"status":200' in done.stdout.splitlines()[-1]
        if shutil.which("node") is None:
            pytest.skip("the curl example ran; Node.js is not installed for the other")
        (script,) = blocks("http.md", "javascript")
        (tmp_path / "send.mjs").write_text(script)
        done = subprocess.run(
            ["node", str(tmp_path / "send.mjs"), server.url], capture_output=True, text=True, timeout=30
        )
        assert re.fullmatch(r"[0-9a-f-]{36}\.0\n", done.stdout), done.stderr
    finally:
        server.stop()
