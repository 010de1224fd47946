"""Servers: chooses the server for each request, among the given addresses and the members that the registry lists.

Any server lists the members. A client stays with one server while it answers, so that outcomes reach the server that
stored their halves. It prefers servers in its own room, and asks for changes every second or two. When a server fails,
it tries another within the caller's deadline: ids make repeating safe. If all given addresses are https, only https
members are used, so that the token is never sent in the clear.

Servers that divide the keys among their logs (the workers of one machine) say so. Then each request is for one shard,
and is repeated only there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from notify.client.transport.http import HttpClient, read_answer, until_closed
from notify.client.transport.login import Shown, Token
from notify.errors import Closed, DiskFull, ForeignAnswer, InvalidRequest, NotifyError, Timeout, Unavailable
from notify.protocol.keys import shard_of_key
from notify.protocol.wire import MSGPACK
from notify.runtime.backoff import CHANCE
from notify.runtime.environment import value_of
from notify.runtime.program_log import program_log
from notify.runtime.urls import refuse_user

log = program_log("notify.client")

REFRESH_SECONDS = 1.5
UNREGISTERED_REFRESH_SECONDS = 30.0
"""The interval without a registry, which may be switched on later."""
LISTING_SECONDS = 5.0
"""How long servers may take to list the members: a slow line or a busy server takes longer than one that is near."""
ASKED_SECONDS = 1.0
"""How long a first request waits for them."""
NEXT_SECONDS = 1.0
"""How long one address may be silent before the next one is asked, too."""
PROBE_SECONDS, PROBE_AGAIN_SECONDS = 1.0, 10.0
"""How long a new member may take to answer at its own address, and when a silent one is tried again."""
DOWN_SECONDS = 1.0
"""How long a server that failed is avoided, if there is another."""
LONG_POLL_SECONDS = 15.0
SHORTEST_ATTEMPT_SECONDS = 0.5
KEEPS_SECONDS, LARGE_REQUEST = 0.5, 100
"""How long small requests without keys stay with one of several shards; and from how many items a request is large."""


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
    """Whether a request with halves may also carry outcomes."""

    def servers(self) -> list[Member]:
        """The members that take requests; the registry also lists bridges and relays."""
        return [member for member in self.members if member.kind == "server" and member.url]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that answers, as the registry knows it."""

    url: str
    room: str = ""
    """The server's setting `room`; empty if it has none."""
    load: float = 0.0
    """Transactions per second that the server stored, as of a second or two ago."""


Chooser = Callable[[Sequence[Candidate], str], Candidate]
"""A function that gets the candidates (at least one) and the client's room, and returns one of the candidates."""


def room_then_load(candidates: Sequence[Candidate], room: str) -> Candidate:
    """A server in the client's room if there is one, else any server; the lower a server's load, the likelier.

    The choice is random, because clients that choose at the same time, after a server has failed, would otherwise all
    choose the same server.
    """
    near = [candidate for candidate in candidates if room and candidate.room == room] or list(candidates)
    return CHANCE.choices(near, [1 / (1 + max(0.0, candidate.load)) for candidate in near])[0]


def chosen_by(chooser: Chooser, candidates: Sequence[Candidate], room: str) -> str:
    """The address of the candidate that the chooser returns. Raises InvalidRequest if it raises or returns another."""
    try:
        chosen = chooser(candidates, room)
    except Exception as error:
        raise InvalidRequest(f"the chooser raised {type(error).__name__}: {error}") from error
    url = getattr(chosen, "url", None)
    urls = [candidate.url for candidate in candidates]
    if url not in urls:
        shown = repr(chosen if url is None else url)[:60]
        raise InvalidRequest(f"the chooser returned {shown}, which is none of {', '.join(urls)}")
    return str(url)


class Keyed(Protocol):
    """A message whose shard depends on its key."""

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

        `room`: the room of this client, by default `NOTIFY_ROOM`; `tls`, `token`: as for HttpClient; `chooser`: picks
        one of several servers for a request. Raises InvalidRequest if `url` is not an address.
        """
        if not isinstance(url, str):
            raise InvalidRequest(
                f"the address of the server is {url!r:.60}: it should be text, such as http://127.0.0.1:7400"
            )
        refuse_user(url)  # before the split: a password may contain a comma
        self._seeds = [part.strip().rstrip("/") for part in url.split(",") if part.strip()]
        if not self._seeds:
            raise InvalidRequest("give the address of a server, such as http://127.0.0.1:7400")
        self._role = role
        self._chooser = chooser
        self._room = value_of("NOTIFY_ROOM") if room is None else room
        self._tls, self._token = tls, token if isinstance(token, Token) else Token(token)
        self._clients = {seed: HttpClient(seed, tls=tls, token=self._token) for seed in self._seeds}
        self._left: list[HttpClient] = []
        """Clients of former members, with requests on their way."""
        self._members: list[Member] = []
        self._identities: tuple[object, ...] = ()
        """Name, address, roles and room of each member; empty without a registry."""
        self._only_tls = all(urlsplit(seed).scheme == "https" for seed in self._seeds)
        self._refused: frozenset[str] = frozenset()
        """The addresses of members that are not used because the token would go to them in the clear."""
        self._down: dict[str, float] = {}
        """Until when (the loop's time) servers that failed are avoided."""
        self._reached: set[str] = set(self._seeds)
        """The addresses that have answered, and those that the user gave."""
        self._unreached: frozenset[str] = frozenset()
        """The addresses of members that have never answered; behind a proxy or in containers nobody may reach them."""
        self._current = ""
        self._refreshing: asyncio.Task[None] | None = None
        self._was_asked = asyncio.Event()
        """Set once the members were asked for, even if no server answered."""
        self._is_known = False
        """Whether a server has listed the members."""
        self._look = asyncio.Event()
        """Set to have the members asked for immediately."""
        self.keys: tuple[str, ...] = ()
        """The shards among which the servers divide the keys."""
        self.takes_outcomes = False
        """Whether the server that listed the members takes outcomes in requests with halves."""
        self._apart: frozenset[str] = frozenset()
        """The shards that only some servers of the role have."""
        self._turn = CHANCE.randrange(1 << 16)
        """Counts through the shards for items without a key; it starts at random, so that clients differ."""
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
        """Like HttpClient.call, but tries one server after the other within `seconds`.

        `shard`: only servers that have this shard. `of_all`: if the servers are the workers of one machine, the
        request goes to the given addresses, for all workers.
        """
        self._begin_refreshing()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        tried: set[str] = set()
        urls = self._untried(shard, tried, of_all)
        while True:
            url = self._pick(shard, urls)
            remaining = deadline - loop.time()
            attempt_seconds = remaining
            if len(urls) > 1 and seconds <= LONG_POLL_SECONDS:
                attempt_seconds = max(remaining / 2, min(remaining, SHORTEST_ATTEMPT_SECONDS))
            try:
                return await self._client(url).call(method, path, body, max(attempt_seconds, 0.001), kind)
            except NotifyError as error:
                if not _another_may_do(error):
                    raise
                tried.add(url)
                self._failed(url)
                urls = self._untried(shard, tried, of_all)
                if not urls or deadline - loop.time() <= 0:
                    raise

    def _client(self, url: str) -> HttpClient:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = HttpClient(url, tls=self._tls, token=self._token)
        return client

    def _untried(self, shard: str | None, tried: set[str], of_all: bool) -> list[str]:
        """The addresses that a request may still go to: untried members, then the untried given addresses, because
        members may have changed their addresses. A worker does not answer a request for all workers."""
        if of_all and self.keys:
            return [url for url in self._seeds if url not in tried]
        urls = [url for url in self.urls(shard) if url not in tried]
        if not urls and shard is None:
            urls = [url for url in self._seeds if url not in tried]
        return urls

    def _pick(self, shard: str | None, urls: Sequence[str]) -> str:
        """One of `urls`: the current server if it is among them, else the chooser's choice among those that have not
        failed just now."""
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
        """The client of the server, if there is only one server. Any thread may ask."""
        return None if self.keys or len(self.urls()) > 1 else self._clients.get(self._current)

    # --- the members ------------------------------------------------------------------------------------------

    def urls(self, shard: str | None = None) -> Sequence[str]:
        """The addresses of the members with this client's role; with `shard`, only members that have it, if any do.

        If none of them has ever answered at its own address, but the registry came by a given one, there is a proxy in
        between: then it is the given addresses.
        """
        members = [m for m in self._members if self._role in m.roles]
        if not any(m.url in self._reached for m in members):
            return self._seeds
        if shard is not None:
            members = [m for m in members if shard in m.shards] or members
        return [m.url for m in members]

    async def known(self, seconds: float) -> None:
        """Return once a server has listed the members. Raises Unavailable if none does within `seconds`, and the
        refusal of one that answers.

        For what must not take several logs for one.
        """
        if not self._is_known:
            await self.refresh(seconds)
            self._begin_refreshing()

    async def asked(self) -> None:
        """Wait at most ASKED_SECONDS until the members were asked for, even if no server answered.

        For requests that tell more clearly why no server answers, and that servers correct.
        """
        if not self._was_asked.is_set():
            self._begin_refreshing()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASKED_SECONDS):
                    await self._was_asked.wait()

    @property
    def are_apart(self) -> bool:
        """Whether several addresses were given, and their servers know nothing of each other."""
        return len(self._seeds) > 1 and not self._members

    def look_again(self) -> None:
        """Ask for the members soon, because an answer shows that they have changed."""
        self._look.set()

    def close_idle(self) -> None:
        """Close the idle connections to all servers; see HttpClient.close_idle."""
        for client in self._clients.values():
            client.close_idle()

    def is_apart(self, shard: str | None) -> bool:
        """Whether only some servers of the role have the shard, so that its requests can go only to them."""
        return shard in self._apart

    def places(self) -> Sequence[str]:
        """One shard of each log, if the servers of the role have several logs; empty if they share one storage."""
        shards = {tuple(m.shards) for m in self._members if self._role in m.roles}
        return sorted(shard_names[0] for shard_names in shards if shard_names) if len(shards) > 1 else ()

    def shard_of(self, messages: Iterable[Keyed]) -> str | None:
        """The shard of messages that are sent together, by their first key; None: any shard."""
        if self.keys:
            for message in messages:
                if message.key is not None:
                    return shard_of_key(message.key, self.keys)
        return None

    def shard_for(self, count: int) -> str:
        """A shard for a request of `count` items without a key, if keys are divided among shards.

        Small requests stay with one shard for a while, because spread over several they would be more and smaller, and
        cost more. A large request goes to the next shard. A shard that failed just now is skipped.
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
            self._refreshing = asyncio.get_running_loop().create_task(self._keep_refreshing())

    async def _keep_refreshing(self) -> None:
        while not self._closed:
            if not self._is_known or self._was_asked.is_set():  # else `known` has just asked
                with contextlib.suppress(NotifyError):
                    await self.refresh()
            self._was_asked.set()
            has_no_registry = self._is_known and not self._identities
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNREGISTERED_REFRESH_SECONDS if has_no_registry else REFRESH_SECONDS):
                    await self._look.wait()
            self._look.clear()

    async def refresh(self, seconds: float = LISTING_SECONDS) -> None:
        """Ask the servers for the members until one answers, for at most `seconds`: first the current one, and another
        after each second of silence and each failure.

        Raises Unavailable if no server answers, and the refusal if one refuses and no other answers.
        """
        addresses = [self._current, *(m.url for m in self._members), *self._seeds]
        answer = await self._listed(list(dict.fromkeys(address for address in addresses if address)), seconds)
        self._is_known = True
        self.takes_outcomes = answer.outcomes_with_halves
        if answer.version:
            self._learn(answer.servers(), tuple(answer.keys))
            await self._reach()

    async def _listed(self, urls: list[str], seconds: float) -> Members:
        """The first answer of the servers; see `refresh`."""
        deadline = asyncio.get_running_loop().time() + seconds
        pause = min(NEXT_SECONDS, seconds / 2 / len(urls))  # the last one still has half of the time
        waiting, asking = list(reversed(urls)), set[asyncio.Task[Members]]()
        failures: list[NotifyError] = []
        try:
            while waiting or asking:
                if waiting:
                    asking.add(asyncio.ensure_future(self._list(waiting.pop(), deadline)))
                ended, asking = await asyncio.wait(
                    asking, timeout=pause if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    try:
                        return task.result()
                    except NotifyError as error:
                        failures.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        if all(isinstance(error, Timeout) for error in failures):
            raise Timeout(
                f"no answer from {' and '.join(urls)} within {seconds:g} s: look whether it hangs, or is busy"
            )
        raise max(failures, key=_tells)

    async def _list(self, url: str, deadline: float) -> Members:
        seconds = max(deadline - asyncio.get_running_loop().time(), 0.001)
        return read_answer(decode_members, await self._client(url).call("GET", "/v1/members", b"", seconds))

    def _learn(self, members: list[Member], keys: tuple[str, ...]) -> None:
        members = self._not_in_the_clear(members)
        identities = tuple((m.name, m.url, *m.roles, m.room) for m in members)
        self._members = members  # always, because their loads change
        self.keys = keys
        of_role = [frozenset(m.shards) for m in members if self._role in m.roles]
        self._apart = frozenset[str]().union(*of_role) - frozenset.intersection(*of_role) if of_role else frozenset()
        if identities == self._identities:
            return
        self._identities = identities
        # Choose a server again, so that an added server gets its share.
        self._current = ""
        used_urls = {*self._seeds, *(m.url for m in members)}
        self._reached &= used_urls
        self._down = {url: again_at for url, again_at in self._down.items() if url in used_urls}
        for url in [url for url in self._clients if url not in used_urls]:
            leaving = self._clients.pop(url)
            leaving.close_when_idle()
            self._left = [client for client in (*self._left, leaving) if client.is_open]

    async def _reach(self) -> None:
        """Ask each new member at its own address, which may be unreachable from here."""
        now = asyncio.get_running_loop().time()
        urls = [m.url for m in self._members if m.url not in self._reached and self._down.get(m.url, 0.0) <= now]
        if not urls:
            return
        answers = await asyncio.gather(*[self._client(url).is_reachable(PROBE_SECONDS) for url in urls])
        self._reached.update(url for url, has_answered in zip(urls, answers, strict=True) if has_answered)
        again_at = asyncio.get_running_loop().time() + PROBE_AGAIN_SECONDS
        self._down |= {url: again_at for url in urls if url not in self._reached}
        self._current = "" if any(answers) else self._current  # an added server gets its share
        unreached = frozenset(m.url for m in self._members if self._role in m.roles and m.url not in self._reached)
        if unreached - self._unreached:
            log.warning(
                "%s: the registry lists this address for a server, and no Notify server answers there; requests go to "
                "other servers, or to %s: set NOTIFY_URL of that server to the address by which clients reach it",
                ", ".join(sorted(unreached)), ", ".join(self._seeds),
            )  # fmt: skip
        self._unreached = unreached

    def _not_in_the_clear(self, members: list[Member]) -> list[Member]:
        if not self._only_tls:
            return members
        refused = frozenset(m.url for m in members if urlsplit(m.url).scheme != "https")
        if refused != self._refused:
            self._refused = refused
            for url in sorted(refused):
                log.warning(
                    "the member %s is not used: requests to it would go out in the clear, and %s is https; start "
                    "it with TLS (its setting `url` says where it is reached)",
                    url,
                    self._seeds[0],
                )
        return [m for m in members if m.url not in refused]

    async def aclose(self) -> None:
        """Cut every connection, and wait until the loop has closed them."""
        self.close()
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing])  # not `gather`: see Running.close
        await until_closed([*self._clients.values(), *self._left])

    def close(self) -> None:
        """Cut every connection, without waiting."""
        self._closed = True
        self._was_asked.set()
        if self._refreshing is not None:
            self._refreshing.cancel()
        for client in (*self._clients.values(), *self._left):
            client.close()


def more_telling(error: NotifyError, before: NotifyError | None, seconds: float) -> NotifyError:
    """The error to raise after an attempt of `seconds` failed: a timeout of a very short attempt does not hide the
    error of the previous attempt, `before`."""
    is_hasty = isinstance(error, Timeout) and seconds < SHORTEST_ATTEMPT_SECONDS
    return before if is_hasty and before is not None else error


def _tells(error: NotifyError) -> int:
    """How much a failure tells: a server's refusal, another program's answer, no connection, silence."""
    if not isinstance(error, Unavailable):
        return 3
    return 2 if isinstance(error, ForeignAnswer) else int(not isinstance(error, Timeout))


def _another_may_do(error: NotifyError) -> bool:
    """Whether another server may succeed: the one that failed is unreachable, stopping, slow, full, or has another
    role."""
    if error.status == 421:
        return error.code == "wrong_role"
    if isinstance(error, Closed):
        return False
    return (isinstance(error, Unavailable) and error.status != 429) or isinstance(error, DiskFull)
