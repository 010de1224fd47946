"""Authentication: finds the principal of a request by its token or client certificate."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from notify.errors import NotifyError, Unauthorized, Unavailable
from notify.runtime import faults
from notify.runtime.clock import Clock, steady_clock
from notify.runtime.log_output import LogRate
from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.access.lookup import Lookup, Unknown
from notify.server.access.principal import EVERYONE, Principal, Quota
from notify.server.access.rights import Right, parse_rights
from notify.server.settings import Settings

if TYPE_CHECKING:
    from notify.server.access.oidc import Provider

log = structlog.get_logger("notify.server")

SHOWN_BYTES = 16 << 10
"""The longest header `Authorization` that is looked at: a longer one costs the event loop time before its sender is
known."""
KNOWN = 10_000
"""The most tokens whose principal is remembered; the oldest is forgotten first."""
KNOWN_BYTES = 8 << 20
"""The most bytes of these tokens; a provider's has up to 16 KiB, and each can be written in several ways: with more
spaces in front, for example."""
KNOWN_SECONDS = 300.0
"""After this time a provider's token is verified again."""
VERIFYING = 1000
"""The most requests whose token is being verified or looked up; each may hold a part of its body."""
AWAITING_KEYS = 100
"""The most requests that wait for a provider's keys; a token whose key is known does not wait."""
PROVIDER_THREADS = 2
"""Threads that verify signatures. One more thread waits for the provider's answers."""
PROVIDER_SECONDS = 10.0
"""How long verifying a provider's token may take, with fetching the discovery document and keys."""
FETCH_AGAIN_SECONDS = 10.0
"""The shortest time between two fetches of keys; an unknown key name causes a fetch."""
FETCH_FAILED_SECONDS = 1.0
"""The same after a fetch that failed."""
REFUSED_SECONDS = 60.0
"""How long a refused provider's token is refused without verifying it again."""
SUBJECTS = 10_000
"""The most subjects of a provider whose quota is remembered; the least recently seen is forgotten first."""
REFUSALS_A_SECOND = 10
"""The most refusals that are logged in a second."""

_NOT_OURS = "this server does not know this token: it was mistyped, or belongs to another server"
_NOTHING_SHOWN = (
    "authentication required: send a token (Authorization: Bearer …; the SDK and `notify` take it from NOTIFY_TOKEN or "
    "NOTIFY_TOKEN_FILE), or a client certificate if mutual TLS is on"
)


def provider_of(settings: Settings) -> Provider | None:
    """The identity provider of the settings; None if they name no provider, or access is off."""
    if not (settings.access and settings.oidc_issuer):
        return None
    from notify.server.access.oidc import Provider

    return Provider(settings.oidc_issuer, settings.oidc_audience, settings.oidc_rights_claim)


class Access:
    """Authenticates requests by the credentials that were read last; looks an unknown caller up before refusing it.

    While `on` is False everyone may do everything.
    """

    def __init__(
        self,
        settings: Settings,
        look: Callable[[], Awaitable[None]],
        clock: Clock = steady_clock,
        provider: Provider | None = None,
    ) -> None:
        """`look` reads the records and calls `learn` if the credentials have changed (see Lookup).

        `clock`: the clock by which credentials were made; this machine's clock may differ from it.
        """
        self.clock = clock
        self.on = settings.access
        self.settings = settings
        self._provider = provider
        self._credentials: dict[str, Credential] = {}
        self._by_proof: dict[tuple[str, str], Credential] = {}
        self._principals: dict[str, Principal] = {}
        self._in_use: weakref.WeakSet[Principal] = weakref.WeakSet()
        """All principals: a waiting request may have one that has been forgotten since."""
        self._verified_lately: OrderedDict[bytes, tuple[Principal, Credential | None, float]] = OrderedDict()
        self._verified_bytes = 0
        self.used_us: dict[str, int] = {}
        """When each credential was last used (microseconds since 1970, by id), until that is recorded."""
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
        """Why the last fetch failed; None if it succeeded."""
        self._awaiting_keys = 0

    def close(self) -> None:
        """Stop fetching keys and verifying tokens."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fetch_thread.shutdown(wait=False, cancel_futures=True)

    def learn(self, credentials: Sequence[Credential]) -> None:
        """Replace the credentials. Principals of unchanged credentials stay, with their quotas."""
        before = self._credentials
        self._credentials = {c.id: c for c in credentials}
        # If several credentials have the same name, the newest counts: the others have expired.
        by_age = sorted(credentials, key=lambda c: c.created_us)
        self._by_proof = {(c.kind, c.proof): c for c in by_age if c.kind != "token" and not c.revoked_us}
        unchanged = {n for n, c in self._credentials.items() if n in before and _grants(before[n]) == _grants(c)}
        for number in self._principals.keys() - unchanged:
            del self._principals[number]
        for principal in list(self._in_use):
            if principal.credential and principal.credential not in unchanged:
                principal.end()
        self._forget_verified()

    def configure(self, settings: Settings) -> None:
        """Follow new settings: other quotas hold from now on."""
        if (settings.principal_requests, settings.principal_polls) != (
            self.settings.principal_requests,
            self.settings.principal_polls,
        ):
            self._principals.clear()
            self._quotas.clear()
            self._forget_verified()
        self.settings = settings

    def known(self, authorization: bytes) -> Principal | None:
        """The principal of an authorization header that was verified lately, without waiting; else None."""
        if not self.on:
            return EVERYONE
        remembered = self._verified_lately.get(authorization)
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
        """The principal by authorization header (may be empty) and certificate (its common name), without waiting.

        None: only `verify` can tell, because it is a provider's token, or a credential that is not known here (yet).
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

    def recognised(self, authorization: bytes, certificate: str | None) -> Principal | None:
        """The principal as of `admit`; None where `admit` raises, or cannot tell. Nothing is logged."""
        principal = self.known(authorization)
        if principal is None and (authorization or certificate):
            with contextlib.suppress(NotifyError):
                principal = self._let_in(authorization, certificate)
        return principal

    async def principal(self, authorization: bytes, certificate: str | None) -> Principal:
        """The result of `admit`, or of `verify` if `admit` cannot tell."""
        principal = self.admit(authorization, certificate)
        return await self.verify(authorization, certificate) if principal is None else principal

    async def verify(self, authorization: bytes, certificate: str | None) -> Principal:
        """The principal where `admit` could not tell.

        Raises Unauthorized; Unavailable if the provider or the database does not answer in time, or too many requests
        wait for them already.
        """
        try:
            if self._verifying >= VERIFYING:
                raise Unavailable("too many requests wait for authentication; try again")
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
            return await self._verified_by_provider(self._provider, authorization, token)
        await self._lookup.look()
        principal = self._let_in(authorization, certificate)
        if principal is not None:
            return principal
        if number is None:
            # Not remembered as unknown: a certificate may exist before its credential, while a token never does.
            raise Unauthorized(f"no valid credential exists for certificate {str(certificate)[:100]!r}")
        self._unknown.add(number)
        raise Unauthorized(_NOT_OURS)

    def _let_in(self, authorization: bytes, certificate: str | None) -> Principal | None:
        """`admit` without the tokens that were verified lately."""
        if not authorization:
            if certificate is None:
                raise Unauthorized(_NOTHING_SHOWN)
            credential = self._by_proof.get(("certificate", certificate))
            if credential is None or not credential.holds(self.clock()):
                return None
            self.used_us[credential.id] = self.clock()
            return self._principal_of(credential)
        if len(authorization) > SHOWN_BYTES:
            raise Unauthorized(f"this token is longer than {SHOWN_BYTES} bytes: ask for one with fewer claims")
        scheme, _, rest = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized(_NOTHING_SHOWN)
        token = rest.strip()
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

    async def _verified_by_provider(self, provider: Provider, authorization: bytes, token: bytes) -> Principal:
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
            if has_key:  # without the key nothing was verified, and the provider may still publish it
                self._refused.add(_digest(token))
            raise
        rights = parse_rights(claims.rights)
        credential = await self._subject_credential(claims.subject, is_needed=not rights)
        expires_us = round(claims.expires_at * 1e6)
        if credential is None:
            quota = self._quota(f":{claims.subject}", 0, 0)
            principal = self._new(claims.subject, rights, quota, "", expires_us)
        else:
            rights = (*rights, *parse_rights(credential.rights))
            quota = self._quota(credential.id, credential.requests, credential.polls)
            expires_us = min(expires_us, credential.expires_us or expires_us)
            principal = self._new(credential.name, rights, quota, credential.id, expires_us)
        until = min(claims.expires_at, self.clock() / 1e6 + KNOWN_SECONDS)
        self._remember(authorization, principal, credential, until)
        return principal

    def _quota(self, key: str, requests: float, polls: int) -> Quota:
        """The quota of a provider's subject, which all its tokens share."""
        quota = self._quotas.pop(key, None)
        requests, polls = requests or self.settings.principal_requests, polls or self.settings.principal_polls
        if quota is None or (quota.requests, quota.polls) != (requests, polls):
            quota = Quota(requests, polls, self.clock())
        while len(self._quotas) >= SUBJECTS:
            self._quotas.popitem(last=False)
        self._quotas[key] = quota
        return quota

    async def _fetch_keys(self, provider: Provider) -> None:
        """Return when keys were fetched, or the last fetch is too recent. All callers wait for the same fetch.

        Raises Unavailable if too many callers wait, or the last fetch failed.
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
            raise Unavailable(f"the keys of the identity provider cannot be fetched: {self._fetch_failure}")

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

    async def _subject_credential(self, subject: str, is_needed: bool) -> Credential | None:
        """The valid credential for a provider's subject, if there is one.

        Raises Unavailable if the records cannot be read and the credential `is_needed`; else the rights in the token
        are enough.
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
        principal = self._principals.get(credential.id)
        if principal is None:
            requests = credential.requests or self.settings.principal_requests
            quota = Quota(requests, credential.polls or self.settings.principal_polls, self.clock())
            rights = parse_rights(credential.rights)
            principal = self._new(credential.name, rights, quota, credential.id, credential.expires_us)
            self._principals[credential.id] = principal
        return principal

    def _new(self, name: str, rights: Sequence[Right], quota: Quota, credential: str, expires_us: int) -> Principal:
        """A principal that is kept in sight while something uses it, so that it ends with its credential."""
        principal = Principal(name, rights, quota, credential=credential, expires_us=expires_us)
        self._in_use.add(principal)
        return principal

    def _remember(
        self, authorization: bytes, principal: Principal, credential: Credential | None, until: float
    ) -> None:
        if authorization in self._verified_lately:
            self._verified_lately[authorization] = (principal, credential, until)
            return
        self._verified_bytes += len(authorization)
        self._verified_lately[authorization] = (principal, credential, until)
        while len(self._verified_lately) > KNOWN or self._verified_bytes > KNOWN_BYTES:
            oldest, _ = self._verified_lately.popitem(last=False)
            self._verified_bytes -= len(oldest)

    def _forget_verified(self) -> None:
        self._verified_lately.clear()
        self._verified_bytes = 0

    def _log_refusal(self, error: NotifyError) -> None:
        if self._refusals.may():
            log.warning("refused", reason=str(error)[:200])


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _grants(credential: Credential) -> Credential:
    """The credential without the time of its last use, which grants nothing."""
    return dataclasses.replace(credential, used_us=0)
