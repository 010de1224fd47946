"""Letting in: from what a request shows (a token, a certificate) to its principal."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from notify.errors import NotifyError, Unauthorized
from notify.server.access import tokens
from notify.server.access.principal import EVERYONE, Principal
from notify.server.access.rights import Right, parse_rights
from notify.server.clock import wall_clock
from notify.settings import Settings

if TYPE_CHECKING:
    from notify.server.access.oidc import Provider
    from notify.server.admin.records import Credential

log = structlog.get_logger("notify.server")

KNOWN = 10_000
"""Tokens whose principal is remembered, of those that were shown last."""
KNOWN_SECONDS = 300.0
"""After so long a provider's token is verified again."""
REFUSALS_A_SECOND = 10
"""How many refusals are logged."""

_NOTHING_SHOWN = "show a token (Authorization: Bearer …), or a client certificate where mutual TLS is on"


class Access:
    """Who may come in, as of the credentials that were read last. While `on` is False: everyone, to everything."""

    def __init__(self, settings: Settings) -> None:
        self.on = settings.access
        self.settings = settings
        self._provider: Provider | None = None
        if settings.access and settings.oidc_issuer:
            from notify.server.access.oidc import Provider

            self._provider = Provider(settings.oidc_issuer, settings.oidc_audience, settings.oidc_rights_claim)
        self._credentials: dict[str, Credential] = {}
        self._by_proof: dict[tuple[str, str], Credential] = {}
        self._principals: dict[str, Principal] = {}
        self._known: OrderedDict[bytes, tuple[Principal, Credential | None, float]] = OrderedDict()
        self.used_us: dict[str, int] = {}
        """When which credential was last used, until someone takes note of it."""
        self._logged = (0, 0)

    def learn(self, credentials: Sequence[Credential]) -> None:
        """The credentials that there are now; of those that did not change, principals keep their counts."""
        before = self._credentials
        self._credentials = {c.id: c for c in credentials}
        self._by_proof = {(c.kind, c.proof): c for c in credentials if c.kind != "token" and not c.revoked_us}
        same = {n for n, c in self._credentials.items() if n in before and _grants(before[n]) == _grants(c)}
        self._principals = {n: p for n, p in self._principals.items() if n in same}
        self._known.clear()

    def configure(self, settings: Settings) -> None:
        """Other quotas from now on."""
        if (settings.principal_requests, settings.principal_polls) != (
            self.settings.principal_requests,
            self.settings.principal_polls,
        ):
            self._principals.clear()
            self._known.clear()
        self.settings = settings

    def known(self, authorization: bytes) -> Principal | None:
        """The principal of a header that was seen lately, without waiting for anything."""
        if not self.on:
            return EVERYONE
        found = self._known.get(authorization)
        if found is None:
            return None
        principal, credential, until = found
        now_us = wall_clock()
        if credential is not None and not credential.holds(now_us):
            return None
        if now_us > until * 1e6:
            return None
        if credential is not None:
            self.used_us[credential.id] = now_us
        return principal

    def admit(self, authorization: bytes, certificate: str | None) -> Principal | None:
        """Who shows this header (empty: none) and certificate (its common name).

        None: a provider's token, which `verify` has to look at. Raises Unauthorized.
        """
        found = self.known(authorization)
        if found is not None:
            return found
        try:
            return self._let_in(authorization, certificate)
        except Unauthorized as error:
            self._log_refusal(error)
            raise

    async def principal(self, authorization: bytes, certificate: str | None) -> Principal:
        """As `admit`, waiting for the provider where it has to. Raises Unauthorized, or Unavailable."""
        found = self.admit(authorization, certificate)
        return await self.verify(authorization) if found is None else found

    async def verify(self, authorization: bytes) -> Principal:
        """The principal of a provider's token. Raises Unauthorized, or Unavailable where the provider is away."""
        try:
            return await self._of_provider(authorization, authorization.partition(b" ")[2].strip())
        except NotifyError as error:
            self._log_refusal(error)
            raise

    def _let_in(self, authorization: bytes, certificate: str | None) -> Principal | None:
        if not authorization:
            if certificate is None:
                raise Unauthorized(_NOTHING_SHOWN)
            credential = self._by_proof.get(("certificate", certificate))
            if credential is None or not credential.holds(wall_clock()):
                raise Unauthorized(f"no credential is made for certificate {certificate[:100]!r}, or it is over")
            self.used_us[credential.id] = wall_clock()
            return self._principal_of(credential)
        scheme, _, shown = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized(_NOTHING_SHOWN)
        token = shown.strip()
        number = tokens.id_of(token)
        if number is None and self._provider is not None:
            return None
        credential = self._credentials.get(number or "")
        if credential is None or credential.kind != "token" or not tokens.is_proved(token, credential.proof):
            raise Unauthorized("this token is none of this server's, or was mistyped")
        if not credential.holds(wall_clock()):
            raise Unauthorized("this token has expired or was revoked: ask for a new one")
        principal = self._principal_of(credential)
        self._remember(authorization, principal, credential, 1 << 40)
        self.used_us[credential.id] = wall_clock()
        return principal

    async def _of_provider(self, authorization: bytes, token: bytes) -> Principal:
        assert self._provider is not None
        claims = await asyncio.to_thread(self._provider.verify, token.decode("latin-1"))
        rights = parse_rights(claims.rights)
        credential = self._by_proof.get(("subject", claims.subject))
        if credential is not None and credential.holds(wall_clock()):
            rights = (*rights, *parse_rights(credential.rights))
            principal = self._made(credential.name, rights, credential.requests, credential.polls)
        else:
            principal = self._made(claims.subject, rights, 0, 0)
        self._remember(authorization, principal, None, min(claims.expires_at, time.time() + KNOWN_SECONDS))
        return principal

    def _principal_of(self, credential: Credential) -> Principal:
        found = self._principals.get(credential.id)
        if found is None:
            rights = parse_rights(credential.rights)
            found = self._made(credential.name, rights, credential.requests, credential.polls)
            self._principals[credential.id] = found
        return found

    def _made(self, name: str, rights: Sequence[Right], requests: float, polls: int) -> Principal:
        return Principal(
            name,
            rights,
            requests=requests or self.settings.principal_requests,
            polls=polls or self.settings.principal_polls,
            now_us=wall_clock(),
        )

    def _remember(self, shown: bytes, principal: Principal, credential: Credential | None, until: float) -> None:
        while len(self._known) >= KNOWN:
            self._known.popitem(last=False)
        self._known[shown] = (principal, credential, until)

    def _log_refusal(self, error: NotifyError) -> None:
        second = int(time.monotonic())
        at, count = self._logged
        self._logged = (second, count + 1 if at == second else 1)
        if self._logged[1] <= REFUSALS_A_SECOND:
            log.warning("refused", reason=str(error)[:200])


def _grants(c: Credential) -> Credential:
    """All of it but when it was used."""
    return dataclasses.replace(c, used_us=0)
