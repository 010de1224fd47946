"""Letting in: from what a request shows (a token, a certificate) to its principal."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from notify import faults
from notify.clock import Clock, steady_clock
from notify.errors import NotifyError, Unauthorized, Unavailable
from notify.log_rate import LogRate
from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.access.lookup import Lookup, Unknown
from notify.server.access.principal import EVERYONE, Principal, Quota
from notify.server.access.rights import Right, parse_rights
from notify.settings import Settings

if TYPE_CHECKING:
    from notify.server.access.oidc import Provider

log = structlog.get_logger("notify.server")

KNOWN = 10_000
"""Tokens whose principal is remembered, of those that were shown last."""
KNOWN_SECONDS = 300.0
"""After so long a provider's token is verified again."""
VERIFYING = 1000
"""Requests whose token is being verified, or looked up, at once; each may hold a part of its body."""
AWAITING_KEYS = 100
"""So many of these may wait for a provider's keys; a token whose key is known waits for nobody."""
PROVIDER_THREADS = 2
"""They compute signatures; a thread of its own waits for the provider, and none of the server's others does."""
PROVIDER_SECONDS = 10.0
"""How long a provider's token may take: its discovery document and its keys may have to be fetched first."""
FETCH_AGAIN_SECONDS = 10.0
"""Keys are fetched again for a key that is not known, and so often at most."""
FETCH_FAILED_SECONDS = 1.0
"""Where they could not be had."""
REFUSED_SECONDS = 60.0
"""For so long a provider's token that was refused is refused without verifying it again."""
SUBJECTS = 10_000
"""A provider's subjects whose quota is remembered, of those that asked last."""
REFUSALS_A_SECOND = 10
"""How many refusals are logged."""

_NOT_OURS = "this token is none of this server's, or was mistyped"
_NOTHING_SHOWN = (
    "show a token (Authorization: Bearer …; the SDK and `notify` show that of NOTIFY_TOKEN), or a client certificate "
    "where mutual TLS is on"
)


def provider_of(settings: Settings) -> Provider | None:
    """The identity provider that the settings name; None where they name none, or access is off."""
    if not (settings.access and settings.oidc_issuer):
        return None
    from notify.server.access.oidc import Provider

    return Provider(settings.oidc_issuer, settings.oidc_audience, settings.oidc_rights_claim)


class Access:
    """Who may come in, as of the credentials that were read last; who is not known is looked up before it is refused.

    While `on` is False: everyone, to everything.
    """

    def __init__(
        self,
        settings: Settings,
        look: Callable[[], Awaitable[None]],
        clock: Clock = steady_clock,
        provider: Provider | None = None,
    ) -> None:
        """`look` reads the records, and has `learn` called where there are other credentials (see Lookup).

        `clock`: the one by which credentials were made; this machine's own may differ from it.
        """
        self.clock = clock
        self.on = settings.access
        self.settings = settings
        self._provider = provider
        self._credentials: dict[str, Credential] = {}
        self._by_proof: dict[tuple[str, str], Credential] = {}
        self._principals: dict[str, Principal] = {}
        self._known: OrderedDict[bytes, tuple[Principal, Credential | None, float]] = OrderedDict()
        self.used_us: dict[str, int] = {}
        """When which credential was last used, until someone takes note of it."""
        self._refusals = LogRate(REFUSALS_A_SECOND)
        self._lookup = Lookup(look)
        self._unknown = Unknown()
        self._verifying = 0
        self._threads = ThreadPoolExecutor(PROVIDER_THREADS, "notify-provider")
        self._refused = Unknown(REFUSED_SECONDS)
        self._quotas: OrderedDict[str, Quota] = OrderedDict()
        self._fetching: asyncio.Task[None] | None = None
        self._fetch_thread = ThreadPoolExecutor(1, "notify-provider-keys")
        self._fetch_not_before = 0.0
        self._fetch_failure: Exception | None = None
        """Why the last fetch failed; None if it did not."""
        self._awaiting_keys = 0

    def close(self) -> None:
        """Verify nothing more."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fetch_thread.shutdown(wait=False, cancel_futures=True)

    def learn(self, credentials: Sequence[Credential]) -> None:
        """The credentials that there are now; of those that did not change, principals keep their counts."""
        before = self._credentials
        self._credentials = {c.id: c for c in credentials}
        # Where several credentials have one name, the newest counts: the others have expired.
        in_turn = sorted(credentials, key=lambda c: c.created_us)
        self._by_proof = {(c.kind, c.proof): c for c in in_turn if c.kind != "token" and not c.revoked_us}
        same = {n for n, c in self._credentials.items() if n in before and _grants(before[n]) == _grants(c)}
        for number in self._principals.keys() - same:
            self._principals.pop(number).end()
        self._known.clear()

    def configure(self, settings: Settings) -> None:
        """Other quotas from now on."""
        if (settings.principal_requests, settings.principal_polls) != (
            self.settings.principal_requests,
            self.settings.principal_polls,
        ):
            self._principals.clear()
            self._quotas.clear()
            self._known.clear()
        self.settings = settings

    def known(self, authorization: bytes) -> Principal | None:
        """The principal of a header that was seen lately, without waiting for anything."""
        if not self.on:
            return EVERYONE
        remembered = self._known.get(authorization)
        if remembered is None:
            return None
        principal, credential, until = remembered
        now_us = self.clock()
        if credential is not None and not credential.holds(now_us):
            return None
        if now_us > until * 1e6:
            return None
        if credential is not None:
            self.used_us[credential.id] = now_us
        return principal

    def admit(self, authorization: bytes, certificate: str | None) -> Principal | None:
        """Who shows this header (empty: none) and certificate (its common name), without waiting for anything.

        None: it may be good, and only `verify` can tell: a provider's token, or what is not known here (yet).
        Raises Unauthorized.
        """
        principal = self.known(authorization)
        if principal is not None:
            return principal
        try:
            return self._let_in(authorization, certificate)
        except Unauthorized as error:
            self._log_refusal(error)
            raise

    async def principal(self, authorization: bytes, certificate: str | None) -> Principal:
        """As `admit`, and as `verify` where that has to tell."""
        principal = self.admit(authorization, certificate)
        return await self.verify(authorization, certificate) if principal is None else principal

    async def verify(self, authorization: bytes, certificate: str | None) -> Principal:
        """Who shows what `admit` could not judge.

        Raises Unauthorized, or Unavailable where the provider or the database does not answer in time, or too many
        wait for them already.
        """
        try:
            if self._verifying >= VERIFYING:
                raise Unavailable("too many requests wait to be let in; try again")
            self._verifying += 1
            try:
                return await self._verified(authorization, certificate)
            finally:
                self._verifying -= 1
        except NotifyError as error:
            self._log_refusal(error)
            raise

    async def _verified(self, authorization: bytes, certificate: str | None) -> Principal:
        token = authorization.partition(b" ")[2].strip()
        number = tokens.id_of(token)
        if authorization and number is None:
            if self._provider is None:
                raise Unauthorized(_NOT_OURS)
            return await self._of_provider(self._provider, authorization, token)
        await self._lookup.look()
        principal = self._let_in(authorization, certificate)
        if principal is not None:
            return principal
        if number is None:
            # Not remembered: a name may be shown before a credential is made for it, while an id comes with its token.
            raise Unauthorized(f"no credential is made for certificate {str(certificate)[:100]!r}, or it is over")
        self._unknown.add(number)
        raise Unauthorized(_NOT_OURS)

    def _let_in(self, authorization: bytes, certificate: str | None) -> Principal | None:
        """As `admit`."""
        if not authorization:
            if certificate is None:
                raise Unauthorized(_NOTHING_SHOWN)
            credential = self._by_proof.get(("certificate", certificate))
            if credential is None or not credential.holds(self.clock()):
                return None
            self.used_us[credential.id] = self.clock()
            return self._principal_of(credential)
        scheme, _, shown = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized(_NOTHING_SHOWN)
        token = shown.strip()
        number = tokens.id_of(token)
        if number is None:
            if self._provider is None:
                raise Unauthorized(_NOT_OURS)
            self._provider.key_name(token.decode("latin-1"))
            if _digest(token) in self._refused:
                raise Unauthorized("the bearer token is not valid: it was refused a moment ago")
            return None
        credential = self._credentials.get(number)
        if credential is None and number not in self._unknown:
            return None
        if credential is None or credential.kind != "token" or not tokens.is_proved(token, credential.proof):
            raise Unauthorized(_NOT_OURS)
        if not credential.holds(self.clock()):
            raise Unauthorized("this token has expired or was revoked: ask for a new one")
        principal = self._principal_of(credential)
        self._remember(authorization, principal, credential, 1 << 40)
        self.used_us[credential.id] = self.clock()
        return principal

    async def _of_provider(self, provider: Provider, authorization: bytes, token: bytes) -> Principal:
        loop = asyncio.get_running_loop()
        text = token.decode("latin-1")
        has_key = True
        try:
            async with asyncio.timeout(PROVIDER_SECONDS):
                has_key = provider.has_key(provider.key_name(text))
                if not has_key:
                    await self._fetch_keys(provider)
                claims = await loop.run_in_executor(self._threads, provider.verify, text)
        except TimeoutError:
            raise Unavailable("the identity provider does not answer in time; try again") from None
        except Unauthorized:
            if has_key:  # else nothing was computed, and the provider may be about to publish a new key
                self._refused.add(_digest(token))
            raise
        rights = parse_rights(claims.rights)
        credential = await self._of_subject(claims.subject, is_needed=not rights)
        if credential is None:
            principal = Principal(claims.subject, rights, self._quota(f":{claims.subject}", 0, 0))
        else:
            rights = (*rights, *parse_rights(credential.rights))
            quota = self._quota(credential.id, credential.requests, credential.polls)
            principal = Principal(credential.name, rights, quota)
        until = min(claims.expires_at, self.clock() / 1e6 + KNOWN_SECONDS)
        self._remember(authorization, principal, credential, until)
        return principal

    def _quota(self, key: str, requests: float, polls: int) -> Quota:
        """The quota of a provider's subject, whichever of its tokens it shows."""
        quota = self._quotas.pop(key, None)
        requests, polls = requests or self.settings.principal_requests, polls or self.settings.principal_polls
        if quota is None or (quota.requests, quota.polls) != (requests, polls):
            quota = Quota(requests, polls, self.clock())
        while len(self._quotas) >= SUBJECTS:
            self._quotas.popitem(last=False)
        self._quotas[key] = quota
        return quota

    async def _fetch_keys(self, provider: Provider) -> None:
        """Return when keys were fetched, or need not be again so soon. Whoever waits, waits for the same fetch.

        Raises Unavailable where too many wait, or the keys cannot be had.
        """
        if self._awaiting_keys >= AWAITING_KEYS:
            raise Unavailable("too many tokens wait for the identity provider's keys; try again")
        if self._fetching is None and asyncio.get_running_loop().time() >= self._fetch_not_before:
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(provider))
        if self._fetching is not None:
            self._awaiting_keys += 1
            try:
                await asyncio.shield(self._fetching)
            finally:
                self._awaiting_keys -= 1
        if self._fetch_failure is not None:
            raise Unavailable(f"the keys of the identity provider cannot be had: {self._fetch_failure}")

    async def _fetch(self, provider: Provider) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._fetch_thread, provider.fetch)
        except Exception as error:
            self._fetch_failure = error
            if not isinstance(error, faults.PASSING):
                faults.unexpected("provider_keys_not_fetched", error)
        else:
            self._fetch_failure = None
        self._fetch_not_before = loop.time() + (FETCH_FAILED_SECONDS if self._fetch_failure else FETCH_AGAIN_SECONDS)
        self._fetching = None

    async def _of_subject(self, subject: str, is_needed: bool) -> Credential | None:
        """The credential made for a provider's subject, if there is one.

        Raises Unavailable where that cannot be known; but unless it `is_needed`, what the token itself says is enough.
        """
        credential = self._by_proof.get(("subject", subject))
        if credential is None or not credential.holds(self.clock()):
            try:
                await self._lookup.look()
            except Unavailable:
                if is_needed:
                    raise
            credential = self._by_proof.get(("subject", subject))
        return credential if credential is not None and credential.holds(self.clock()) else None

    def _principal_of(self, credential: Credential) -> Principal:
        found = self._principals.get(credential.id)
        if found is None:
            rights = parse_rights(credential.rights)
            found = self._made(credential.name, rights, credential.requests, credential.polls)
            self._principals[credential.id] = found
        return found

    def _made(self, name: str, rights: Sequence[Right], requests: float, polls: int) -> Principal:
        requests, polls = requests or self.settings.principal_requests, polls or self.settings.principal_polls
        return Principal(name, rights, Quota(requests, polls, self.clock()))

    def _remember(self, shown: bytes, principal: Principal, credential: Credential | None, until: float) -> None:
        while len(self._known) >= KNOWN:
            self._known.popitem(last=False)
        self._known[shown] = (principal, credential, until)

    def _log_refusal(self, error: NotifyError) -> None:
        if self._refusals.may():
            log.warning("refused", reason=str(error)[:200])


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _grants(c: Credential) -> Credential:
    """All of it but when it was used."""
    return dataclasses.replace(c, used_us=0)
