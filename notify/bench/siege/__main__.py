"""A server under siege: all attacks of strangers and of clients with few rights, beside a producer and a consumer.

The rates of producer and consumer are measured without the attacks, with them, and without them again. During the
attacks they must keep half, and the server's memory may grow by less than 100 MiB. Attackers, producer and consumer are
separate processes. On few cores any client takes CPU time from the server, so the attackers' own CPU is bounded
(`--share` of one core): the run measures what their requests cost the server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import multiprocessing
import os
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from notify import ids
from notify.client.http import HttpClient
from notify.errors import NotifyError
from notify.server.access import tokens
from notify.testing.process import ServerProcess
from notify.wire import (
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    Receive,
    Settle,
    SettleItem,
    encode_msgpack,
)

KEPT_SHARE = 0.5
GROWTH_BYTES = 100 << 20
CALLERS = 8
BODY = b"x" * 200
WARM_SECONDS = 5.0
SAMPLE_SECONDS = 0.25
BIG, LETTERS = 60, 2000
"""The number of messages of 128 KiB for unread answers, and of dead letters for searches."""
DEAREST = (
    " && ".join(['key.matches("' + "(k|kk)*" * 10 + '")', *['headers.all(h, h != "x")'] * 3]) + ' && key == "none"'
)
"""An allowed filter of almost the highest cost."""


# --- the producer and the consumer ----------------------------------------------------------------------------------


def load(url: str, token: str, sent: Any, received: Any) -> None:
    """Run producers and a consumer until the process is ended; count both."""
    asyncio.run(_load(url, token, sent, received))


async def _load(url: str, token: str, sent: Any, received: Any) -> None:
    http = HttpClient(url, token=token)

    async def produce() -> None:
        while True:
            name = ids.to_text(ids.new_id())
            half = PackedTransaction(id=name, messages=[PackedMessage(topic="order", body=BODY, key="k" * 200)])
            outcome = OutcomeItem(id=name, outcome="COMMIT")
            with contextlib.suppress(NotifyError):
                request = PackedTransactions(producer_group="shop", transactions=[half])
                await http.call("POST", "/v1/transactions", encode_msgpack(request), 10)
                outcomes = Outcomes(producer_group="shop", outcomes=[outcome])
                await http.call("POST", "/v1/transactions/outcomes", encode_msgpack(outcomes), 10)
                sent.value += 1

    async def consume() -> None:
        import msgspec

        asked = encode_msgpack(Receive(instance="points-1", topics=["order"], max=100, wait=5, lease=30))
        while True:
            with contextlib.suppress(NotifyError):
                answer = await http.call("POST", "/v1/groups/points/receive", asked, 20)
                receipts = [message["receipt"] for message in msgspec.msgpack.decode(answer)["messages"]]
                if receipts:
                    items = [SettleItem(receipt=receipt, action="ack") for receipt in receipts]
                    await http.call("POST", "/v1/groups/points/settle", encode_msgpack(Settle(items=items)), 20)
                    received.value += len(receipts)

    await asyncio.gather(*[produce() for _ in range(CALLERS)], consume())


# --- the attackers --------------------------------------------------------------------------------------------------


class Attackers:
    """All attacks, in one event loop with bounded CPU time."""

    def __init__(self, url: str, provider: str, rights: dict[str, str], share: float, only: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._provider = provider
        self._rights = rights
        self._share = share
        self._only = only
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self.done: Counter[str] = Counter()

    async def turn(self) -> None:
        """Wait until the CPU bound allows one more step."""
        used = time.process_time() - self._cpu
        behind = used / self._share - (time.monotonic() - self._began)
        await asyncio.sleep(max(0.001, min(1.0, behind)))

    async def run(self) -> None:
        crowds: list[tuple[Callable[[int], Awaitable[None]], int]] = [
            (self.cookie, 3),
            (self.pipeline, 10),
            (self.trailers, 10),
            (self.slow_head, 200),
            (self.slow_body, 100),
            (self.unread_pages, 20),
            (self.unread_pulls, 60),
            (self.polls, 300),
            (self.unknown_tokens, 10),
            (self.providers_tokens, 100),
            (self.names, 5),
            (self.topics, 5),
            (self.search, 3),
            (self.refused_filter, 2),
        ]
        crowds = [crowd for crowd in crowds if self._only in ("", crowd[0].__name__)]
        await asyncio.gather(*[self.again(attack, n) for attack, count in crowds for n in range(count)])

    async def again(self, attack: Callable[[int], Awaitable[None]], number: int) -> None:
        """Repeat an attack, also after the server closed its connection."""
        await asyncio.sleep(random.random() * 2)
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await attack(number)
            self.done[attack.__name__] += 1
            await self.turn()

    @contextlib.asynccontextmanager
    async def connected(self, limit: int = 1 << 16) -> Any:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=limit)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, method: str, path: str, right: str = "", *fields: str) -> bytes:
        shown = [f"authorization: Bearer {self._rights.get(right, right)}"] if right else []
        return "\r\n".join((f"{method} {path} HTTP/1.1", "host: notify.example", *shown, *fields, "", "")).encode()

    def post(self, path: str, right: str, body: Any) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head("POST", path, right, "content-type: application/json", f"content-length: {len(data)}") + data

    async def asked(self, request: bytes, times: int = 20) -> None:
        """Send a request repeatedly on one connection, and read the answers."""
        async with self.connected() as (reader, writer):
            for _ in range(times):
                await self.turn()
                writer.write(request)
                async with asyncio.timeout(90):
                    answer = await reader.readuntil(b"\r\n\r\n")
                    for line in answer.lower().split(b"\r\n"):
                        if line.startswith(b"content-length:"):
                            await reader.readexactly(int(line[15:]))

    async def cookie(self, number: int) -> None:
        await self.asked(self.head("GET", "/livez", "", 'cookie: notify_token="' + "\\" * 60_000 + '"'))

    async def pipeline(self, number: int) -> None:
        async with self.connected() as (_, writer):
            for _ in range(1000):
                await self.turn()
                writer.write(self.head("GET", "/livez") * 1000)
                await asyncio.wait_for(writer.drain(), 30)

    async def trailers(self, number: int) -> None:
        async with self.connected() as (_, writer):
            path = ("/livez", "/login")[number % 2]
            writer.write(self.head("POST", path, "", "transfer-encoding: chunked") + b"1\r\nx\r\n0\r\n")
            for n in range(10_000):
                await self.turn()
                writer.write(b"".join(b"x-%d-%d: %b\r\n" % (n, m, b"y" * 40) for m in range(500)))
                await asyncio.wait_for(writer.drain(), 30)

    async def slow_head(self, number: int) -> None:
        async with self.connected() as (reader, writer):
            writer.write(b"GET /livez HTTP/1.1\r\nx-a: " + b"y" * 60_000 * (number % 2) + b"\r\n")
            for n in range(60):
                writer.write(b"x-%d: y\r\n" % n)
                if await self._ended(reader):
                    return

    async def slow_body(self, number: int) -> None:
        async with self.connected() as (reader, writer):
            path, right = (("/login", ""), ("/v1/messages", "polls"))[number % 2]
            writer.write(self.head("POST", path, right, "content-type: application/json", "content-length: 1000000"))
            writer.write(b" " * 60_000)
            for _ in range(60):
                writer.write(b" ")
                if await self._ended(reader):
                    return

    async def _ended(self, reader: asyncio.StreamReader) -> bool:
        """Whether the server has closed the connection within a second; one step of a slow attack."""
        try:
            return await asyncio.wait_for(reader.read(1000), 1) == b""
        except TimeoutError:
            return False

    async def unread_pages(self, number: int) -> None:
        await self._never_read(self.head("GET", "/static/uPlot.iife.min.js") * 30)

    async def unread_pulls(self, number: int) -> None:
        await self._never_read(self.head("GET", "/v1/topics/big/queues/0/messages?max=60", "read") * 4)

    async def _never_read(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(connection, (self._host, self._port))
            await loop.sock_sendall(connection, request)
            await asyncio.sleep(20)

    async def polls(self, number: int) -> None:
        body = {
            "instance": f"i{number}",
            "topics": ["order" if number % 2 else "quiet"],
            "max": 1,
            "wait": 60,
            "lease": 1,
        }
        group = "filtered" if number % 2 else "crowd"
        await self.asked(self.post(f"/v1/groups/{group}/receive", "polls", body), 1)

    async def unknown_tokens(self, number: int) -> None:
        for _ in range(20):
            shown = tokens.new_token(tokens.new_id())[0]
            await self.asked(self.post("/v1/messages", shown, {"messages": []}), 1)

    async def providers_tokens(self, number: int) -> None:
        claims = {"iss": self._provider, "aud": "notify", "sub": "x", "exp": 1 << 40, "jti": random.random()}
        parts = [json.dumps(part).encode() for part in ({"alg": "RS256", "kid": f"k{random.random()}"}, claims)]
        shown = ".".join([*(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts), "c2lnbmVk"])
        async with self.connected() as (reader, writer):
            writer.write(self.head("POST", "/v1/messages", shown, "content-length: 8000000") + b"x" * 300_000)
            await asyncio.wait_for(reader.read(1000), 30)

    async def names(self, number: int) -> None:
        name = "n" * 1_000_000 + str(random.random())
        body = {"producer_group": name, "instance": "i", "wait": 0, "max": 1}
        await self.asked(self.post("/v1/checks/poll", "polls", body), 3)

    async def topics(self, number: int) -> None:
        names = [f"t{random.random()}" for _ in range(5000)]
        body = {"instance": "i", "topics": names, "max": 1, "wait": 0, "lease": 1}
        await self.asked(self.post("/v1/groups/crowd/receive", "polls", body), 3)

    async def search(self, number: int) -> None:
        await self.asked(
            self.head("GET", "/v1/admin/groups/dead/dead-letters?filter=key%20%3D%3D%20%22z%22", "view"), 5
        )

    async def refused_filter(self, number: int) -> None:
        nested = "[0,1].all(a,[0,1].all(b,[0,1].all(c,[0,1].all(d,true))))"
        await self.asked(self.head("GET", f"/v1/admin/groups/dead/dead-letters?filter={nested}", "view"), 5)


def attack(url: str, provider: str, rights: dict[str, str], share: float, only: str) -> None:
    """Attack until the process is ended."""
    os.nice(5)
    asyncio.run(Attackers(url, provider, rights, share, only).run())


# --- what the attackers bring: a receiver that drips, a provider that is silent ---------------------------------------


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


# --- measuring ------------------------------------------------------------------------------------------------------


async def prepare(server: ServerProcess, admin: str, webhook: str) -> dict[str, str]:
    """Make topics, groups, and messages to search and read; return the tokens by purpose."""
    http = HttpClient(server.url, token=admin)

    async def call(method: str, path: str, body: Any = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        return json.loads(await http.call(method, path, data, 60, "application/json"))

    async def token(*rights: str) -> str:
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


class Measured:
    """The rates of producer and consumer, and the server's memory, in one phase."""

    def __init__(self, server: ServerProcess, sent: Any, received: Any, seconds: float) -> None:
        began, before = time.monotonic(), (sent.value, received.value, server.cpu_seconds())
        self.most_bytes = server.anonymous_bytes()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(min(SAMPLE_SECONDS, seconds - passed))  # the pause between two samples
            self.most_bytes = max(self.most_bytes, server.anonymous_bytes())
        self.sent = (sent.value - before[0]) / passed
        self.received = (received.value - before[1]) / passed
        self.cores = (server.cpu_seconds() - before[2]) / passed

    def line(self, phase: str) -> str:
        memory = self.most_bytes / (1 << 20)
        return (
            f"{phase:<16}{self.sent:>10,.0f} sent/s{self.received:>10,.0f} received/s{memory:>8,.0f} MiB at most"
            f"{self.cores:>8.2f} cores"
        )


def besiege(directory: Path, seconds: float, share: float, only: str = "") -> bool:
    """Run all phases, print figures and verdict, and return whether it is PASS."""
    provider, webhook = Listener(b""), Listener(b"y")
    environment = {
        "NOTIFY_ACCESS": "1", "NOTIFY_OIDC_ISSUER": f"http://{provider.place}", "NOTIFY_WEBHOOK_SECRET": "siege",
        "NOTIFY_WEBHOOK_HOSTS": webhook.place,
    }  # fmt: skip
    server = ServerProcess(directory / "data", environment=environment).start()
    processes: list[Any] = []
    try:
        admin = (directory / "data" / "admin.token").read_text().strip()
        rights = asyncio.run(prepare(server, admin, f"http://{webhook.place}/"))
        context = multiprocessing.get_context("spawn")
        sent, received = context.Value("q", 0), context.Value("q", 0)
        processes.append(context.Process(target=load, args=(server.url, rights["load"], sent, received), daemon=True))
        processes[0].start()
        Measured(server, sent, received, WARM_SECONDS)
        before = Measured(server, sent, received, seconds / 3)
        print(before.line("without"), flush=True)
        arguments = (server.url, f"http://{provider.place}", rights, share, only)
        processes.append(context.Process(target=attack, args=arguments, daemon=True))
        processes[1].start()
        during = Measured(server, sent, received, seconds)
        print(during.line("under siege"), flush=True)
        processes[1].terminate()
        processes[1].join()
        after = Measured(server, sent, received, seconds / 3)
        print(after.line("without again"), flush=True)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        server.stop()
        for listener in (provider, webhook):
            listener.close()
    kept = {
        "producer": during.sent / max(1e-9, (before.sent + after.sent) / 2),
        "consumer": during.received / max(1e-9, (before.received + after.received) / 2),
    }
    growth = max(0, during.most_bytes - before.most_bytes)
    good = min(kept.values()) >= KEPT_SHARE and growth < GROWTH_BYTES
    shares = ", ".join(f"the {client} keeps {share:.0%} of its rate" for client, share in kept.items())
    print(
        f"VERDICT: {'PASS' if good else 'FAIL'} {shares} (at least {KEPT_SHARE:.0%}), memory grows by "
        f"{growth / (1 << 20):.0f} MiB (less than {GROWTH_BYTES >> 20})"
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of the siege; a third of it before and after")
    parser.add_argument("--share", type=float, default=0.2, help="of one core: the attackers' own CPU")
    parser.add_argument("--only", default="", help="one attack by its name, to see what it costs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        good = besiege(Path(directory), given.seconds, given.share, given.only)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
