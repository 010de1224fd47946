"""The services of docker-compose.yml, run as processes on MariaDB: no Docker engine is needed.

Commands, environments, order and health checks come from the file; ports, directories and the database are the test's.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from notify.client.tables.creation import create_tables
from notify.testing.ports import free_ports
from notify.testing.process import Child, ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.http import REASON, ask, call, is_ready
from tests.support.shop import make_engine

ROOT = Path(__file__).parents[2]
STORAGE = "mysql+pymysql://notify:notify@127.0.0.1:3306/notify"


class Composition:
    """The services that `docker compose up` starts, but for MySQL and Kafka."""

    def __init__(self, database: str, directory: Path) -> None:
        self._services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self._database = database
        self.data = directory / "data"
        self.data.mkdir()
        self._ports = {str(7400 + n): str(port) for n, port in enumerate(free_ports(4))}
        self._running: dict[str, Child] = {}
        self._output: dict[str, list[str]] = {}
        self._ended: set[str] = set()

    def port(self, port: int) -> str:
        return self._ports[str(port)]

    def _here(self, text: str) -> str:
        """A word of the file, with the ports and directories of this test."""
        text = text.replace(STORAGE, self._database).replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"/data\b", str(self.data), text)
        return re.sub(r"\b740[0-3]\b", lambda m: self._ports[m[0]], text)

    def up(self, name: str) -> None:
        """Start a service once its dependencies are in the state that the file asks for."""
        if name in self._running or name in self._ended or name == "mysql":
            return
        service = self._services[name]
        for other in service["depends_on"]:
            self.up(other)
        environment = os.environ | {key: self._here(value) for key, value in service["environment"].items()}
        words = [self._here(word) for word in service["command"]]
        if "entrypoint" in service:  # the words of a shell, for a service that ends by itself
            notify = shlex.join([sys.executable, "-m", "notify.cli.main"])
            command = [*service["entrypoint"], words[0].replace("notify token", notify + " token")]
            subprocess.run(command, env=environment, check=True, timeout=2 * PATIENCE_SECONDS)
            self._ended.add(name)
            return
        process = ServerProcess.launch(words, environment)
        self._output[name] = []
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()
        if service.get("restart") == "no":
            assert process.wait(PATIENCE_SECONDS) == 0, self.log(name)
            self._ended.add(name)
            return
        self._running[name] = process
        if "healthcheck" in service:
            test = service["healthcheck"]["test"]
            assert test[:2] == ["CMD", "python"]
            command = [sys.executable, *(self._here(word) for word in test[2:])]
            eventually(lambda: self._is_healthy(name, command), f"{name} to be healthy")

    def _is_healthy(self, name: str, command: list[str]) -> bool:
        assert self._running[name].poll() is None, self.log(name)
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0

    def _read(self, name: str, process: Child) -> None:
        assert process.stdout is not None
        with process.stdout:
            self._output[name].extend(process.stdout)

    def log(self, name: str) -> str:
        return "".join(self._output[name])[-3000:]

    def down(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(PATIENCE_SECONDS)


@pytest.fixture
def composed(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[Composition]:
    with ExitStack() as stack:
        database = stack.enter_context(empty_database("mariadb", database_urls, tmp_path))
        made = Composition(database, tmp_path)
        stack.callback(made.down)
        for name in ("server-1", "server-2", "server-3", "bridge"):
            made.up(name)
        yield made


def test_the_compose_services_start_and_share_a_token(composed: Composition, tmp_path: Path, unique: str) -> None:
    queue, server = (f"http://127.0.0.1:{composed.port(port)}" for port in (7400, 7401))
    admin = (composed.data / "queue" / "admin.token").read_text().strip()
    assert not list(composed.data.glob("server-*/admin.token")), "all servers share one first token"
    assert (composed.data / "bridge.token").stat().st_mode & 0o077 == 0
    # Without a token nobody gets in; with the first token each console answers.
    for url in (queue, server):
        eventually(lambda url=url: is_ready(url), f"{url} to be ready")
        assert ask(url, "GET", "/v1/admin/overview")[0] == 401
        eventually(lambda url=url: ask(url, "GET", "/v1/admin/overview", token=admin)[0] == 200, "the first token")
        page = urllib.request.Request(url + "/", headers={"authorization": f"Bearer {admin}"})
        assert b"Overview" in urllib.request.urlopen(page, timeout=PATIENCE_SECONDS).read()
    # A business service with a token of its own, made as the file's first lines say.
    rights = ["publish:*", "check:*", "consume:*"]
    body = {"name": "shop", "rights": rights, "reason": "the shop"}
    token = call(queue, "POST", "/v1/admin/credentials", body, admin)["token"]
    shop = make_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(shop)
    eventually(lambda: ask(server, "GET", "/v1/members", token=token)[0] == 200, "the new token")
    call(queue, "PUT", f"/v1/admin/topics/{unique}", {"reason": REASON}, admin)
    call(queue, "PUT", f"/v1/admin/groups/{unique}/subscriptions/{unique}", {"reason": REASON}, admin)
    with TransactionProducer(server, group=unique, engine=shop, token=token) as producer:
        with Session(shop) as session, producer.transaction(session) as transaction:
            transaction.send(Message(unique, "through the bridge"))

        def servers() -> set[str]:
            members = ask(server, "GET", "/v1/members", token=token)[1]["members"]
            return {m["url"] for m in members if m["kind"] == "server"}

        # In the file no server waits for the others.
        urls = {f"http://127.0.0.1:{composed.port(port)}" for port in range(7400, 7404)}
        eventually(lambda: servers() == urls, "all servers among the members")

    def received() -> list[str]:
        asked = {"instance": "i", "topics": [unique], "wait": 5}
        return [m["body"] for m in call(queue, "POST", f"/v1/groups/{unique}/receive", asked, token)["messages"]]

    try:
        assert eventually(received, "the bridge to bring the message") == ["through the bridge"]
    finally:
        shop.dispose()
        print(composed.log("bridge"))
