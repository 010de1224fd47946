"""The stage of a siege: topics, groups, messages and tokens with few rights, and servers that are slow or silent."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from notify.client.transport.http import HttpClient
from notify.protocol import ids
from notify.testing.process import ServerProcess

BIG, LETTERS = 60, 2000
"""The number of messages of 128 KiB for unread answers, and of dead letters for searches."""
DEAREST = (
    " && ".join(['key.matches("' + "(k|kk)*" * 10 + '")', *['headers.all(h, h != "x")'] * 3]) + ' && key == "none"'
)
"""An allowed filter of almost the highest cost."""


async def prepare(server: ServerProcess, admin: str, webhook: str) -> dict[str, str]:
    """Make topics, groups, and messages to search and read; return the tokens by purpose (empty without `admin`)."""
    http = HttpClient(server.url, token=admin)

    async def call(method: str, path: str, body: Any = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        return json.loads(await http.call(method, path, data, 60, "application/json"))

    async def token(*rights: str) -> str:
        if not admin:
            return ""
        body = {"name": "siege", "rights": rights, "reason": "siege"}
        return str((await call("POST", "/v1/admin/credentials", body))["token"])

    made = {
        "load": await token("publish:order", "check:shop", "consume:points", "read"),
        "read": await token("read:big"),
        "polls": await token("consume:crowd", "consume:filtered", "check:crowd"),
        "view": await token("view"),
        "all": await token("publish", "check", "consume"),
        "dripped": await token("publish:order", "check:dripped"),
    }
    for group, topic, text in (("points", "order", ""), ("filtered", "order", DEAREST), ("crowd", "quiet", ""),
                               ("dead", "failing", ""), ("big", "big", "")):  # fmt: skip
        body = {"reason": "siege", "filter": text, "max_attempts": 1}
        await call("PUT", f"/v1/admin/groups/{group}/subscriptions/{topic}", body)
    await call("PUT", "/v1/admin/check-webhooks", {"reason": "siege", "webhooks": {"dripped": webhook}})
    http.close()
    http = HttpClient(server.url, token=made["all"])
    for _ in range(BIG):
        await call("POST", "/v1/messages", {"messages": [{"topic": "big", "body": "x" * (128 << 10)}]})
    for _ in range(LETTERS // 500):
        messages = [{"topic": "failing", "body": "x", "key": str(n)} for n in range(500)]
        await call("POST", "/v1/messages", {"messages": messages})
        asked = {"instance": "i", "max": 500, "wait": 1, "lease": 60}
        leased = (await call("POST", "/v1/groups/dead/receive", asked))["messages"]
        items = [{"receipt": m["receipt"], "action": "dead_letter", "reason": "siege"} for m in leased]
        await call("POST", "/v1/groups/dead/settle", {"items": items})
    http.close()
    http = HttpClient(server.url, token=made["dripped"])
    for _ in range(20):
        half = {"id": ids.to_text(ids.new_id()), "messages": [{"topic": "order", "body": "x"}], "check_after": 0.5}
        await call("POST", "/v1/transactions", {"producer_group": "dripped", "transactions": [half]})
    http.close()
    return made


class Listener:
    """Accepts connections, and answers slowly, byte by byte, or not at all."""

    def __init__(self, drip: bytes) -> None:
        self._drip = drip
        self._ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._drip:
                connection.sendall(b"HTTP/1.1 200 OK\r\nx-a: ")
            while not self._ended.wait(0.5):
                connection.sendall(self._drip)

    def close(self) -> None:
        self._ended.set()
        self._listening.close()
