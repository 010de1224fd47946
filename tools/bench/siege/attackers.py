"""The attacks, all at once in one process whose CPU time is bounded; and a process that burns as much CPU time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from notify.server.access import tokens

LOOPS = 64
"""How many loops ask for the page to sign in."""
MEGABYTE = 1 << 20
FORM, LONG = "content-type: application/x-www-form-urlencoded", f"content-length: {MEGABYTE}"


class Attackers:
    """All attacks, in one event loop with bounded CPU time."""

    def __init__(self, url: str, provider: str, rights: dict[str, str], share: float, only: str, workers: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._provider = provider
        self._rights = rights
        self._share = share
        self._only = only
        self._workers = workers
        self._asked = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Loops that wait for their next step, by attack."""
        self.done: Counter[str] = Counter()

    async def turn(self) -> None:
        """Wait until the CPU bound allows this attack one more step."""
        task = asyncio.current_task()
        assert task is not None
        step = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task.get_name(), deque()).append(step)
        await step

    async def pace(self) -> None:
        """Let the attacks continue by turns, those with many loops in proportion, within the CPU bound."""
        began, cpu = time.monotonic(), time.process_time()
        while True:
            for attack, waiting in list(self._waiting.items()):
                for _ in range(1 + len(waiting) // 100):
                    if not waiting:
                        break
                    behind = (time.process_time() - cpu) / self._share - (time.monotonic() - began)
                    await asyncio.sleep(max(0.0, min(1.0, behind)))
                    waiting.popleft().set_result(None)
                if not waiting:
                    del self._waiting[attack]
            if not self._waiting:
                await asyncio.sleep(0.001)

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
            (self.refused_names, 10),
            (self.long_keys, 5),
            (self.spellings, 10),
            (self.odd_tokens, 20),
            (self.topics, 5),
            (self.search, 3),
            (self.refused_filter, 2),
            (self.login_forms, 10),
            (self.half_forms, 1000),
            (self.half_bodies, 150),
            (self.half_heads, 5000),
            (self.login_pages, LOOPS),
            (self.static_pages, 16),
            (self.refusals, 16),
        ]
        crowds = [crowd for crowd in crowds if self._only in ("", crowd[0].__name__)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pace())
            for attack, count in crowds:
                for n in range(count):
                    group.create_task(self.again(attack, n), name=attack.__name__)

    async def again(self, attack: Callable[[int], Awaitable[None]], number: int) -> None:
        """Repeat an attack, also after the server closed its connection."""
        while True:
            await self.turn()
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await attack(number)
            self.done[attack.__name__] += 1

    @contextlib.asynccontextmanager
    async def connected(self, limit: int = 1 << 16) -> Any:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=limit)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, method: str, path: str, right: str = "", *fields: str) -> bytes:
        token = self._rights.get(right, right)
        shown = [f"authorization: Bearer {token}"] if token else []
        if self._workers > 1:
            self._asked += 1
            path = f"/worker-{self._asked % self._workers + 1}{path}"
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

    async def refused_names(self, number: int) -> None:
        """Ever new texts that are refused as names, ids, keys, tags and receipts, in requests of any token."""
        text = f"no name {random.random()}" + "n" * (300_000, 10)[number % 2]
        message = {"topic": text, "body": "", "key": text, "tag": text}
        half = {"id": text, "messages": [message]}
        for path, body in (
            ("/v1/messages", {"messages": [message | {"id": text}, message]}),
            ("/v1/transactions", {"producer_group": text, "source": text, "transactions": [half]}),
            ("/v1/outcomes", {"producer_group": "crowd", "outcomes": [{"id": text, "outcome": "commit"}]}),
            (f"/v1/groups/{text[:20_000].replace(' ', '')}/receive", {"instance": text, "topics": [text]}),
            ("/v1/groups/crowd/settle", {"items": [{"receipt": text, "action": text}]}),
            ("/v1/groups/crowd/receive", {"instance": text[:200], "topics": ["quiet"], "max": 1, "wait": 0}),
        ):
            await self.asked(self.post(path, "polls", body), 1)

    async def long_keys(self, number: int) -> None:
        """Keys of megabytes, from callers who may not send: at one worker, and at the workers together."""
        key = f"{random.random()}" + "k" * 900_000
        await self.asked(self.post("/v1/messages", "polls", {"messages": [{"topic": "t", "body": "", "key": key}]}), 1)
        data = json.dumps({"reason": "siege", "body": "", "key": key}).encode()
        for right in ("polls", "view"):
            fields = ("content-type: application/json", f"content-length: {len(data)}", "host: notify.example")
            shown = f"authorization: Bearer {self._rights[right]}"
            head = "\r\n".join(("POST /v1/admin/topics/quiet/messages HTTP/1.1", shown, *fields, "", ""))
            await self.asked(head.encode() + data, 1)

    async def spellings(self, number: int) -> None:
        """One token behind ever other numbers of spaces, and ever other names of the server."""
        spaces = " " * random.randrange(60_000)
        for request in (
            self.head("GET", "/v1/limits", spaces + self._rights["view"]),
            self.head("GET", "/v1/limits", "view").replace(b"notify.example", b"h" * random.randrange(60_000), 1),
        ):
            await self.asked(request, 1)

    async def odd_tokens(self, number: int) -> None:
        """A provider's tokens, unsigned, whose parts are of no provider."""
        claims = json.dumps({"iss": self._provider, "aud": "notify", "sub": "x"})[:-1]
        exp = random.choice(("1e308", "NaN", "Infinity", "1" + "0" * 400, "1" + "0" * 5000, "[" * 2000, '"soon"', "{}"))
        kid = random.choice(('["k"]', "null", "7", "{}", f'"{random.random()}"', '"' + "k" * 9000 + '"'))
        alg = random.choice(('"ES256"', '"RS256"', '"EdDSA"', '"none"', '["RS256"]', "{}", "7"))
        parts = (f'{{"alg": {alg}, "kid": {kid}}}', f'{claims}, "exp": {exp}}}', "signed")
        shown = ".".join(base64.urlsafe_b64encode(part.encode()).rstrip(b"=").decode() for part in parts)
        for path in ("/v1/limits", "/v1/admin/topics", "/"):
            await self.asked(self.head("GET", path, shown), 1)

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

    async def login_forms(self, number: int) -> None:
        form = b"token=" + "%41é".encode() * (MEGABYTE // 5)
        await self.asked(self.head("POST", "/login", "", FORM, f"content-length: {len(form)}") + form, 1)

    async def half_forms(self, number: int) -> None:
        head = self.head("POST", ("/login", "/do/settings.put")[number % 2], "polls" * (number % 2), FORM, LONG)
        await self._half(head + b"token=" + b"x" * (MEGABYTE - 100))

    async def half_bodies(self, number: int) -> None:
        right = ("polls", "all")[number % 2]
        await self._half(self.head("POST", "/v1/messages", right, f"content-length: {8 * MEGABYTE}") + b" " * 8_000_000)

    async def half_heads(self, number: int) -> None:
        await self._half(self.head("GET", "/livez")[:-2] + b"x-a: " + b"y" * 60_000)

    async def _half(self, data: bytes) -> None:
        """Send a request that is not complete, and wait for the end of the connection."""
        async with self.connected() as (reader, writer):
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    while await reader.read(1 << 16):
                        pass

    async def login_pages(self, number: int) -> None:
        await self.asked(self.head("GET", "/login"), 1000)

    async def static_pages(self, number: int) -> None:
        await self.asked(self.head("GET", "/static/uPlot.iife.min.js"), 1000)

    async def refusals(self, number: int) -> None:
        path = ("/v1/messages", "/v1/admin/topics", "/", "/nothing")[number % 4]
        await self.asked(self.head("GET", path, "nobody's"), 1)


def attack(url: str, provider: str, rights: dict[str, str], share: float, only: str, workers: int) -> None:
    """Attack until the process is ended."""
    os.nice(5)
    asyncio.run(Attackers(url, provider, rights, share, only, workers).run())


STEP_SECONDS = 0.005


def burn(share: float) -> None:
    """Use this share of one core until the process is ended, and attack nobody: the rates meanwhile are the bar."""
    os.nice(5)
    while True:
        began = time.process_time()
        while time.process_time() - began < STEP_SECONDS * share:
            pass
        time.sleep(STEP_SECONDS * max(0.0, 1.0 - share))
