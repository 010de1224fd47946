"""Which server a request goes to: one address or several, and whoever the registry says is there.

Any server tells who the members are. A client keeps to one while that answers (its outcomes then find the server that
stored their halves), prefers its own room, looks for changes every second or two, and tries another within the
caller's deadline when one fails: ids make repeating safe. Where all addresses that it was given are https, so is every
member that it uses: a token never goes out in the clear.

Servers that divide the keys among their logs (the workers of one machine) say so: then a request is for one shard, and
is repeated there alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import ssl
from collections.abc import Iterable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from notify.client.choosing import Candidate, Chooser, chosen_by, room_then_load
from notify.client.http import HttpClient
from notify.client.login import Shown, Token
from notify.errors import Closed, DiskFull, InvalidRequest, NotifyError, Unavailable
from notify.keys import shard_of_key
from notify.urls import refuse_user
from notify.wire import MSGPACK

log = logging.getLogger("notify.client")

REFRESH_SECONDS = 1.5
ALONE_REFRESH_SECONDS = 30.0
"""Where there is no registry: it may be switched on later."""
DOWN_SECONDS = 1.0
"""A server that failed is not asked again for so long, if another can be."""
LONG_POLL_SECONDS = 15.0
SHORTEST_ATTEMPT_SECONDS = 0.5
KEEPS_SECONDS, LARGE_REQUEST = 0.5, 100
"""How long small requests without keys keep to one shard of several, and the items of a request that is not small."""
CLOSE_ROUNDS = 1000
"""Looks whether the requests under way have ended, a millisecond or more apart."""


class Member(msgspec.Struct):
    name: str
    kind: str
    url: str
    roles: list[str] = []
    shards: list[str] = []
    room: str = ""
    load: float = 0.0


class Members(msgspec.Struct):
    version: int
    members: list[Member]
    keys: list[str] = []
    """The shards among which the servers divide the keys; empty: any server takes any key."""
    outcomes_with_halves: bool = False
    """Whether a request may carry outcomes beside its halves."""

    def servers(self) -> list[Member]:
        """The members that can be asked; bridges and the like are listed, too."""
        return [member for member in self.members if member.kind == "server" and member.url]


class Keyed(Protocol):
    """A message on its way, as far as its place depends on it."""

    @property
    def key(self) -> str | None: ...


decode_members = msgspec.msgpack.Decoder(Members).decode
"""Decodes the answer of `GET /v1/members`."""


class Servers:
    """Requests to the servers of one role. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        role: str,
        room: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        token: Shown | Token = None,
        chooser: Chooser = room_then_load,
    ) -> None:
        """`url`: one address, or several separated by commas; `role`: transactions or queue.

        `room`: where this client stands, default `NOTIFY_ROOM`; `tls`, `token`: as for HttpClient. Raises
        InvalidRequest for what is no address. `chooser` says which of several servers a request goes to.
        """
        if not isinstance(url, str):
            raise InvalidRequest(
                f"the address of the server is {url!r:.60}: it should be text, such as http://127.0.0.1:7400"
            )
        refuse_user(url)  # a comma in a password would cut it in two
        self._seeds = [part.strip().rstrip("/") for part in url.split(",") if part.strip()]
        if not self._seeds:
            raise InvalidRequest("give the address of a server, such as http://127.0.0.1:7400")
        self._role = role
        self._chooser = chooser
        self._room = os.environ.get("NOTIFY_ROOM", "") if room is None else room
        self._tls, self._token = tls, token if isinstance(token, Token) else Token(token)
        self._clients = {seed: HttpClient(seed, tls=tls, token=self._token) for seed in self._seeds}
        self._left: list[HttpClient] = []
        """Clients of members that left, with requests under way."""
        self._members: list[Member] = []
        self._known: tuple[object, ...] = ()
        self._only_tls = all(urlsplit(seed).scheme == "https" for seed in self._seeds)
        self._refused: frozenset[str] = frozenset()
        """Members that are not used because they would be sent the token in the clear."""
        self._down: dict[str, float] = {}
        self._current = ""
        self._refreshing: asyncio.Task[None] | None = None
        self._was_asked = asyncio.Event()
        """Set once the members were asked for, whatever came of it."""
        self._look = asyncio.Event()
        """Set where the members are to be asked for at once."""
        self.keys: tuple[str, ...] = ()
        """The shards among which the servers divide the keys."""
        self.takes_outcomes = False
        """Whether the server that told of the members takes outcomes in requests with halves."""
        self._apart: frozenset[str] = frozenset()
        """The shards that some servers of the role have, and others have not."""
        self._turn = random.randrange(1 << 16)
        """Counts through the shards of what has no key; not all clients begin with the same one."""
        self._moves_at = 0.0
        self._closed = False

    # --- requests ---------------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        seconds: float,
        kind: str = MSGPACK,
        shard: str | None = None,
        *,
        of_all: bool = False,
    ) -> bytes:
        """As HttpClient.call, on one server after the other within `seconds`; `shard`: of one that has it.

        `of_all`: where the servers are the workers of one machine, of all of them, at the address that was given.
        """
        self._begin_refreshing()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        tried: set[str] = set()
        urls = self._seeds if of_all and self.keys else self._untried(shard, tried)
        while True:
            url = self._pick(shard, urls)
            left = deadline - loop.time()
            attempt = left
            if len(urls) > 1 and seconds <= LONG_POLL_SECONDS:
                attempt = max(left / 2, min(left, SHORTEST_ATTEMPT_SECONDS))
            try:
                return await self._client(url).call(method, path, body, max(attempt, 0.001), kind)
            except NotifyError as error:
                if not _another_may_do(error):
                    raise
                tried.add(url)
                self._failed(url)
                urls = self._untried(shard, tried)
                if not urls or deadline - loop.time() <= 0:
                    raise

    def _client(self, url: str) -> HttpClient:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = HttpClient(url, tls=self._tls, token=self._token)
        return client

    def _untried(self, shard: str | None, tried: set[str]) -> list[str]:
        """Where a request may go. When no member answers: the addresses that were given, as members may have others."""
        urls = [url for url in self.urls(shard) if url not in tried]
        if not urls and shard is None:
            urls = [url for url in self._seeds if url not in tried]
        return urls

    def _pick(self, shard: str | None, urls: Sequence[str]) -> str:
        """One of them: the current one, else one that the chooser takes of those that have not failed just now."""
        now = asyncio.get_running_loop().time()
        alive = [url for url in urls if self._down.get(url, 0.0) <= now] or urls
        if shard is None and self._current in alive:
            return self._current
        chosen = chosen_by(self._chooser, [self._candidate(url) for url in alive], self._room)
        if shard is None:
            self._current = chosen
        return chosen

    def _failed(self, url: str) -> None:
        self._down[url] = asyncio.get_running_loop().time() + DOWN_SECONDS
        if self._current == url:
            self._current = ""

    @property
    def only(self) -> HttpClient | None:
        """The client of the server that is asked, where there is one server; as any thread sees it at this moment."""
        return None if self.keys or len(self.urls()) > 1 else self._clients.get(self._current)

    # --- who is there -----------------------------------------------------------------------------------------

    def urls(self, shard: str | None = None) -> Sequence[str]:
        """The addresses of the role, of those that have a shard if any say so."""
        members = [m for m in self._members if self._role in m.roles]
        if not members:
            return self._seeds
        if shard is not None:
            members = [m for m in members if shard in m.shards] or members
        return [m.url for m in members]

    async def known(self) -> None:
        """Return once the members were asked for; a server that does not answer holds this up for a second or so."""
        if not self._was_asked.is_set():
            self._begin_refreshing()
            await self._was_asked.wait()

    def look_again(self) -> None:
        """Ask for the members soon: a server says that they are others."""
        self._look.set()

    def close_idle(self) -> None:
        """As HttpClient.close_idle."""
        for client in self._clients.values():
            client.close_idle()

    def is_apart(self, shard: str | None) -> bool:
        """Whether only some servers of the role have the shard, so that its requests are for these alone."""
        return shard in self._apart

    def places(self) -> Sequence[str]:
        """A shard of each log, where the servers of the role have several; empty where all have the same storage."""
        shards = {tuple(m.shards) for m in self._members if self._role in m.roles}
        return sorted(names[0] for names in shards if names) if len(shards) > 1 else ()

    def shard_of(self, messages: Iterable[Keyed]) -> str | None:
        """The shard that messages sent as one belong to, by the first key in them; None: anywhere."""
        if self.keys:
            for message in messages:
                if message.key is not None:
                    return shard_of_key(message.key, self.keys)
        return None

    def shard_for(self, count: int) -> str:
        """A shard for so many items without a key in one request, where keys are divided.

        Small requests keep to one shard for a while: divided, they would be more and smaller ones, and cost more. A
        large one goes to the next shard, and so does what would go to one that failed just now.
        """
        now = asyncio.get_running_loop().time()
        if count >= LARGE_REQUEST or now >= self._moves_at:
            self._turn += 1
            self._moves_at = now + KEEPS_SECONDS
        for _ in self.keys:
            shard = self.keys[self._turn % len(self.keys)]
            if any(self._down.get(url, 0.0) <= now for url in self.urls(shard)):
                break
            self._turn += 1
        return shard

    def _candidate(self, url: str) -> Candidate:
        return next((Candidate(url, m.room, m.load) for m in self._members if m.url == url), Candidate(url))

    def _begin_refreshing(self) -> None:
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh_for_ever())

    async def _refresh_for_ever(self) -> None:
        while not self._closed:
            with contextlib.suppress(NotifyError):
                await self.refresh()
            self._was_asked.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS if self._known else ALONE_REFRESH_SECONDS):
                    await self._look.wait()
            self._look.clear()

    async def refresh(self) -> None:
        """Ask any server who is there. Raises Unavailable where none answers."""
        addresses = [self._current, *(m.url for m in self._members), *self._seeds]
        failed: NotifyError = Unavailable("no server answers")
        for url in dict.fromkeys(address for address in addresses if address):
            try:
                found = decode_members(await self._client(url).call("GET", "/v1/members", b"", 1.0))
            except (NotifyError, msgspec.DecodeError) as error:
                failed = error if isinstance(error, NotifyError) else failed
                continue
            self.takes_outcomes = found.outcomes_with_halves
            if found.version:
                self._learn(found.servers(), tuple(found.keys))
            return
        raise failed

    def _learn(self, members: list[Member], keys: tuple[str, ...]) -> None:
        members = self._not_in_the_clear(members)
        known = tuple((m.name, m.url, *m.roles, m.room) for m in members)
        self._members = members  # their loads, at any rate
        self.keys = keys
        of_role = [frozenset(m.shards) for m in members if self._role in m.roles]
        self._apart = frozenset[str]().union(*of_role) - frozenset.intersection(*of_role) if of_role else frozenset()
        if known == self._known:
            return
        self._known = known
        # Choose anew, so that a server that was added gets its share.
        self._current = ""
        wanted = {*self._seeds, *(m.url for m in members)}
        for url in [url for url in self._clients if url not in wanted]:
            left = self._clients.pop(url)
            left.close_when_idle()
            self._left = [client for client in (*self._left, left) if client.is_open]

    def _not_in_the_clear(self, members: list[Member]) -> list[Member]:
        if not self._only_tls:
            return members
        refused = frozenset(m.url for m in members if urlsplit(m.url).scheme != "https")
        if refused != self._refused:
            self._refused = refused
            for url in sorted(refused):
                log.warning(
                    "%s is a member, and is not used: requests to it would go out in the clear, and %s is https; start "
                    "it with TLS (its setting `url` says where it is reached)",
                    url,
                    self._seeds[0],
                )
        return [m for m in members if m.url not in refused]

    async def aclose(self) -> None:
        """Cut every connection, and wait until the loop has let go of them."""
        self.close()
        if self._refreshing is not None:
            await asyncio.gather(self._refreshing, return_exceptions=True)
        clients = [*self._clients.values(), *self._left]
        for _ in range(CLOSE_ROUNDS):
            # A loop must not be closed while it has connections: each is let go of in one of its next rounds.
            await asyncio.sleep(0.001)
            if not any(client.is_open for client in clients):
                break

    def close(self) -> None:
        """Cut every connection, without waiting."""
        self._closed = True
        self._was_asked.set()
        if self._refreshing is not None:
            self._refreshing.cancel()
        for client in (*self._clients.values(), *self._left):
            client.close()


def _another_may_do(error: NotifyError) -> bool:
    """Whether another server may answer better: this one is away, stopping, slow, full, or of another role."""
    if error.status == 421:
        return error.code == "wrong_role"
    if isinstance(error, Closed):
        return False
    return (isinstance(error, Unavailable) and error.status != 429) or isinstance(error, DiskFull)
