"""An unknown token is looked up before it is refused, and many strangers share few looks; in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from notify.errors import Backpressure, Unauthorized, Unavailable
from notify.runtime.clock import wall_clock
from notify.server.access import gate, lookup, tokens
from notify.server.access.credential import Credential
from notify.server.access.gate import Access
from notify.server.access.oidc import Claims
from notify.server.access.principal import Principal
from notify.server.settings import Settings
from tests.support.issuer import Provider
from tests.support.virtual_loop import pass_seconds


class Registry:
    """The credentials in the servers' database, and a server that read them some time ago."""

    def __init__(self, provider: Any = None) -> None:
        self.credentials: list[Credential] = []
        self.looks: list[float] = []
        """When each look began, in the loop's seconds."""
        self.seconds = 0.0
        """How long the database takes for a look."""
        self.failure: Exception | None = None
        self.access = Access(Settings(access=True), self._look, provider=provider)

    async def _look(self) -> None:
        self.looks.append(asyncio.get_running_loop().time())
        as_of_now = list(self.credentials)
        await pass_seconds(self.seconds)
        if self.failure is not None:
            raise self.failure
        self.access.learn(as_of_now)

    def make(self, kind: str = "token", subject: str = "", rights: str = "view", **fields: Any) -> bytes:
        """Make a credential at another server; return its authorization header, for a token."""
        number = tokens.new_id()
        token, proof = tokens.new_token(number) if kind == "token" else ("", subject)
        made = Credential(number, f"{kind}-{number}", kind, proof, (rights,), 0, 0, wall_clock(), 0)
        self.credentials.append(dataclasses.replace(made, **fields))
        return b"Bearer " + token.encode()

    async def outcome(self, shown: bytes, certificate: str | None = None) -> str:
        try:
            return (await self.access.principal(shown, certificate)).name.partition("-")[0]
        except (Unauthorized, Unavailable) as error:
            return error.code

    async def outcomes(self, *shown: bytes) -> list[str]:
        return await asyncio.gather(*[self.outcome(header) for header in shown])


def stranger() -> bytes:
    return b"Bearer " + tokens.new_token(tokens.new_id())[0].encode()


@pytest.mark.virtual_time
async def test_a_credential_made_elsewhere_is_accepted_immediately() -> None:
    registry = Registry()
    for n in range(1, 21):
        shown = registry.make()
        assert registry.access.admit(shown, None) is None
        assert await registry.outcome(shown) == "token"
        assert len(registry.looks) == n
        assert isinstance(registry.access.admit(shown, None), Principal)  # the server knows it from now on
    wrong = shown[:-1] + (b"A" if shown[-1:] != b"A" else b"B")
    with pytest.raises(Unauthorized, match="mistyped"):  # a known id with another secret: there is nothing to look up
        registry.access.admit(wrong, None)
    for gone in (registry.make(revoked_us=1), registry.make(expires_us=1)):
        assert await registry.outcome(gone) == "unauthorized"
        with pytest.raises(Unauthorized, match="expired or was revoked"):
            registry.access.admit(gone, None)
    for nothing in (b"", b"Basic x", b"Bearer x"):
        with pytest.raises(Unauthorized):
            registry.access.admit(nothing, None)
    assert len(registry.looks) == 21  # one look for both


@pytest.mark.long
@pytest.mark.virtual_time
async def test_strangers_share_few_looks_and_keep_nobody_out() -> None:
    registry = Registry()
    registry.seconds = 0.01
    loop = asyncio.get_running_loop()
    came = 0
    waiting: list[asyncio.Task[str]] = []
    while loop.time() < 3:
        came += 20
        waiting += [asyncio.ensure_future(registry.outcome(stranger())) for _ in range(20)]
        if came % 1000 == 0:
            assert await registry.outcome(registry.make()) == "token"
        await pass_seconds(0.005)
    assert set(await asyncio.gather(*waiting)) == {"unauthorized"}
    assert came > 5000
    gaps = [later - earlier for earlier, later in zip(registry.looks, registry.looks[1:], strict=False)]
    assert min(gaps) >= 1 / lookup.LOOKS_A_SECOND - 1e-9
    # One look serves all who show the same id at once.
    begun = len(registry.looks)
    shown = stranger()
    assert await registry.outcomes(*[shown] * 500) == ["unauthorized"] * 500
    assert len(registry.looks) == begun + 1


@pytest.mark.virtual_time
async def test_more_than_a_server_can_bear_are_asked_to_come_again() -> None:
    registry = Registry()
    registry.seconds = 0.5
    waiting = [asyncio.ensure_future(registry.outcome(stranger())) for _ in range(gate.VERIFYING)]
    await pass_seconds(0.1)
    good = registry.make()
    assert await registry.outcome(good) == "unavailable"
    assert set(await asyncio.gather(*waiting)) == {"unauthorized"}
    assert await registry.outcome(good) == "token"


@pytest.mark.virtual_time
async def test_an_unknown_id_is_remembered_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "UNKNOWN", 3)
    registry = Registry()
    shown = [stranger() for _ in range(5)]
    for header in shown:
        assert await registry.outcome(header) == "unauthorized"
    assert len(registry.looks) == 5
    for header in shown[2:]:
        with pytest.raises(Unauthorized):
            registry.access.admit(header, None)
    assert registry.access.admit(shown[0], None) is None  # three are remembered
    await pass_seconds(lookup.UNKNOWN_SECONDS)
    assert registry.access.admit(shown[4], None) is None


@pytest.mark.virtual_time
async def test_a_look_that_began_before_is_not_enough() -> None:
    """A credential may be made during a look: then another look begins. A certificate's name is known beforehand."""
    registry = Registry()
    registry.seconds = 0.5
    early = asyncio.ensure_future(registry.outcome(b"", "shop"))
    await pass_seconds(0.1)
    registry.make("certificate", "shop")
    assert await registry.outcome(b"", "shop") == "certificate"
    assert await early == "unauthorized"
    assert len(registry.looks) == 2


@pytest.mark.virtual_time
async def test_a_certificate_is_let_in_however_it_was_shown_before() -> None:
    registry = Registry()
    assert await registry.outcome(b"", "shop") == "unauthorized"
    registry.make("certificate", "shop", name="zz-first", expires_us=wall_clock() + 50_000)
    assert await registry.outcome(b"", "shop") == "zz"
    gone = registry.credentials[0] = dataclasses.replace(registry.credentials[0], expires_us=1)
    registry.access.learn([gone])
    assert await registry.outcome(b"", "shop") == "unauthorized"
    registry.make("certificate", "shop", name="aa-again")  # the first credential has expired, and is still recorded
    registry.credentials.sort(key=lambda c: c.name)
    assert await registry.outcome(b"", "shop") == "aa"


@pytest.mark.parametrize(
    "break_it",
    [
        lambda registry: setattr(registry, "seconds", 3600.0),
        lambda registry: setattr(registry, "failure", OSError("connection refused")),
    ],
    ids=["hangs", "away"],
)
@pytest.mark.virtual_time
async def test_a_database_that_does_not_answer_refuses_nobody(break_it: Callable[[Registry], None]) -> None:
    registry = Registry()
    known = registry.make()
    assert await registry.outcome(known) == "token"
    good = registry.make()
    break_it(registry)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert set(await registry.outcomes(good, *[stranger() for _ in range(100)])) == {"unavailable"}
    assert loop.time() - began <= lookup.WAIT_SECONDS + 0.1  # seconds of virtual time
    assert len(registry.looks) < 10
    assert await registry.outcome(known) == "token"
    registry.seconds, registry.failure = 0.0, None
    assert await registry.outcomes(good, stranger()) == ["token", "unauthorized"]


@pytest.mark.virtual_time
async def test_who_stops_waiting_takes_nobody_along() -> None:
    registry = Registry()
    registry.seconds = 0.3
    goes = asyncio.ensure_future(registry.outcome(stranger()))
    await pass_seconds(0.1)
    stays = asyncio.ensure_future(registry.outcome(registry.make()))
    await pass_seconds(0.1)
    goes.cancel()  # the request that was cancelled had begun the look
    assert await stays == "token"


async def test_a_subject_made_elsewhere_has_its_rights_at_once() -> None:
    registry = Registry(Provider())
    registry.make("subject", "clerk", "view")
    principal = await registry.access.principal(b"Bearer clerk:", None)
    assert principal.may("view")
    # While the database is unreachable the provider's rights are enough; a token without rights is answered with
    # 503.
    registry.failure = OSError("connection refused")
    assert (await registry.access.principal(b"Bearer service:publish", None)).may("publish")
    assert await registry.outcome(b"Bearer other:") == "unavailable"
    registry.access.close()


class Issuer:
    """A provider with tokens `KEY/SUBJECT`, whose key `k1` is known; it refuses the signature of `forged/…`."""

    def __init__(self) -> None:
        self.known = {"k1"}
        self.fetches: list[str] = []
        self.verified: list[str] = []
        self.fetched = threading.Event()
        self.failure: Exception | None = None

    def key_name(self, token: str) -> str:
        key, _, subject = token.partition("/")
        if not subject:
            raise Unauthorized("no token")
        return "k1" if key == "forged" else key

    def has_key(self, name: str) -> bool:
        return name in self.known

    def fetch(self) -> None:
        self.fetches.append("")
        self.fetched.wait(60)
        if self.failure is not None:
            raise self.failure

    def verify(self, token: str) -> Claims:
        self.verified.append(token)
        key, _, subject = token.partition("/")
        if key not in self.known:
            raise Unauthorized("signed by nobody")
        return Claims(subject, ("view",), 1e12)


def with_issuer() -> tuple[Registry, Issuer]:
    issuer = Issuer()
    return Registry(issuer), issuer


async def test_who_waits_for_a_providers_keys_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up tokens do not block others. 60 of them and a silent provider held an admin read for 49 s."""
    monkeypatch.setattr(gate, "PROVIDER_SECONDS", 0.2)
    registry, issuer = with_issuer()
    unknown = [b"Bearer u%d/x" % n for n in range(gate.AWAITING_KEYS + 50)]
    waiting = [asyncio.ensure_future(registry.outcome(shown)) for shown in unknown]
    await asyncio.sleep(0)  # a turn of the loop
    # Meanwhile a token with a known key is verified, and the server's other threads are free.
    assert (await registry.access.principal(b"Bearer k1/person", None)).name == "person"
    assert await asyncio.gather(*[asyncio.to_thread(int) for _ in range(10)]) == [0] * 10
    assert set(await asyncio.gather(*waiting)) == {"unavailable"}
    assert len(issuer.fetches) == 1 and issuer.verified == ["k1/person"]
    issuer.fetched.set()
    registry.access.close()


async def test_keys_are_fetched_once_for_any_number_of_unknown_ones() -> None:
    registry, issuer = with_issuer()
    issuer.fetched.set()
    for _ in range(3):
        shown = [b"Bearer u%d/x" % n for n in range(50)]
        assert set(await registry.outcomes(*shown)) == {"unauthorized"}
    assert len(issuer.fetches) == 1
    # Where keys cannot be fetched, no token is called wrong.
    registry, issuer = with_issuer()
    issuer.failure = Unavailable("the provider is unreachable")
    issuer.fetched.set()
    assert set(await registry.outcomes(*[b"Bearer u%d/x" % n for n in range(50)])) == {"unavailable"}
    assert len(issuer.fetches) == 1
    registry.access.close()


async def test_a_refused_token_is_not_verified_again() -> None:
    registry, issuer = with_issuer()
    for _ in range(5):
        assert await registry.outcome(b"Bearer forged/person") == "unauthorized"
    assert issuer.verified == ["forged/person"]
    # A text that is clearly no token of the provider occupies no thread.
    assert await registry.outcome(b"Bearer nothing") == "unauthorized"
    with pytest.raises(Unauthorized):
        registry.access.admit(b"Bearer nothing", None)
    assert len(issuer.verified) == 1 and issuer.fetches == []
    registry.access.close()


def nothing() -> None:
    """Stands for the callback that ends a waiting request; no test calls it."""


async def test_the_tokens_of_a_subject_share_its_quota() -> None:
    registry, issuer = with_issuer()
    issuer.known |= {"k2"}
    registry.access.configure(dataclasses.replace(registry.access.settings, principal_polls=1))
    first = await registry.access.principal(b"Bearer k1/person", None)
    second = await registry.access.principal(b"Bearer k2/person", None)
    other = await registry.access.principal(b"Bearer k1/other", None)
    with first.waiting(nothing):
        with pytest.raises(Backpressure), second.waiting(nothing):
            pass
        with other.waiting(nothing):
            pass
    with second.waiting(nothing):
        pass
    registry.access.close()


async def test_a_subjects_credential_that_ended_counts_no_more() -> None:
    """A subject loses the rights of a credential as it expires. A known token kept them for up to 300 s."""
    registry, _ = with_issuer()
    now_us = wall_clock()
    registry.access.clock = lambda: now_us
    registry.make("subject", "person", "admin", expires_us=now_us + 1_000_000)
    assert (await registry.access.principal(b"Bearer k1/person", None)).may("admin")
    now_us += 2_000_000
    assert not (await registry.access.principal(b"Bearer k1/person", None)).may("admin")
    registry.access.close()
