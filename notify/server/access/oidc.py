"""Bearer tokens of an OpenID Connect provider, verified by PyJWT against the keys that the provider publishes."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import jwt

from notify.errors import InvalidRequest, Unauthorized, Unavailable

FETCH_SECONDS = 5
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures only: with a shared secret whoever can verify could forge, and `none` is none."""
LEEWAY_SECONDS = 10
FOUND_AGAIN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Claims:
    """What a verified token says. `expires_at`: seconds since 1970."""

    subject: str
    rights: tuple[str, ...]
    expires_at: float


class Provider:
    """One issuer. Its methods wait for the network: they are called from threads."""

    def __init__(self, issuer: str, audience: str, rights_claim: str) -> None:
        """Raises InvalidRequest for an issuer that is not https (http is taken on loopback only)."""
        self._issuer = issuer.rstrip("/")
        if not self._issuer.startswith(("https://", "http://127.0.0.1:", "http://localhost:")):
            raise InvalidRequest(f"oidc_issuer {issuer!r}: an issuer is an https address")
        self._audience = audience
        self._rights_claim = rights_claim
        self._keys: jwt.PyJWKClient | None = None
        self._found_at = 0.0

    def verify(self, token: str) -> Claims:
        """What the token says. Raises Unauthorized, or Unavailable where the provider's keys cannot be had."""
        try:
            key = self._key_client().get_signing_key_from_jwt(token).key
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                issuer=[self._issuer, self._issuer + "/"],
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWKClientConnectionError as error:
            raise Unavailable(f"the keys of {self._issuer} cannot be had: {error}") from None
        except jwt.PyJWTError as error:
            raise Unauthorized(f"the bearer token is not valid: {error}") from None
        rights = claims.get(self._rights_claim, ())
        if isinstance(rights, str):
            rights = rights.split()
        if not isinstance(rights, list | tuple) or not all(isinstance(right, str) for right in rights):
            raise Unauthorized(f"claim {self._rights_claim} is not a list of rights")
        return Claims(str(claims["sub"]), tuple(rights), float(claims["exp"]))

    def _key_client(self) -> jwt.PyJWKClient:
        now = time.monotonic()
        if self._keys is None or now - self._found_at > FOUND_AGAIN_SECONDS:
            self._keys = jwt.PyJWKClient(self._keys_url(), cache_jwk_set=True, lifespan=300, timeout=FETCH_SECONDS)
            self._found_at = now
        return self._keys

    def _keys_url(self) -> str:
        address = self._issuer + "/.well-known/openid-configuration"
        try:
            with urllib.request.urlopen(address, timeout=FETCH_SECONDS) as answer:
                found: dict[str, Any] = json.loads(answer.read(1 << 20))
            url = str(found["jwks_uri"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{address} cannot be read: {error!r}") from None
        if str(found.get("issuer", "")).rstrip("/") != self._issuer:
            raise Unavailable(f"{address} is the document of another issuer: {found.get('issuer')!r}")
        return url
