"""Bearer tokens of an OpenID Connect provider, verified by PyJWT against the keys that the provider publishes."""

from __future__ import annotations

import base64
import binascii
import json
import time
from dataclasses import dataclass
from typing import Any

import jwt

from notify.errors import InvalidRequest, Unauthorized, Unavailable
from notify.timed_call import answer_to
from notify.urls import has_user, without_secrets

FETCH_SECONDS = 5
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "ES512", "EdDSA"]
"""Only signatures with a public key: who can verify with a shared secret can also forge, and `none` signs nothing."""
LEEWAY_SECONDS = 10
TOKEN_BYTES = 16 << 10
"""A longer token is refused without decoding it."""
KEYS_SECONDS = 300.0
"""After this time keys are fetched again; a key that the provider has withdrawn is accepted until then."""
ANSWER_BYTES = 1 << 20
"""The most bytes of the discovery document, and of the keys."""
MOST_KEYS = 100


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a verified token. `expires_at`: until when it is accepted, in seconds since 1970."""

    subject: str
    rights: tuple[str, ...]
    expires_at: float


class Provider:
    """One issuer, and its keys as fetched last.

    `fetch` waits for the network and `verify` computes, so both are called from threads; the rest takes microseconds.
    """

    def __init__(self, issuer: str, audience: str, rights_claim: str) -> None:
        """Raises InvalidRequest for an issuer that is not https (http is allowed on loopback only)."""
        self._issuer = issuer.rstrip("/")
        is_address = self._issuer.startswith(("https://", "http://127.0.0.1:", "http://localhost:"))
        if not is_address or has_user(self._issuer):
            raise InvalidRequest(
                f"oidc_issuer {without_secrets(issuer)!r}: an issuer is an https address without a user"
            )
        self._audience = audience
        self._rights_claim = rights_claim
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = 0.0

    def key_name(self, token: str) -> str:
        """The name of the key that the token claims to be signed with; nothing is verified.

        Raises Unauthorized if the token is malformed, expired, or not from this issuer for this server. So no request
        waits for keys, and no signature is computed, for a token that is plainly wrong.
        """
        try:
            if len(token) > TOKEN_BYTES:
                raise ValueError("it is too long")
            head, claims, _ = token.split(".")
            header, unverified = _part(head), _part(claims)
            audience = unverified.get("aud")
            if header.get("alg") not in ALGORITHMS:
                raise ValueError("its algorithm is not allowed")
            if str(unverified.get("iss")).rstrip("/") != self._issuer:
                raise ValueError("it is from another issuer")
            if self._audience not in (audience if isinstance(audience, list) else [audience]):
                raise ValueError("it is for another audience")
            if not float(unverified["exp"]) > time.time() - LEEWAY_SECONDS:
                raise ValueError("it has expired")
            return str(header["kid"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # Only the text is kept: a local variable with the error would keep this frame, and the token, in memory.
            reason = str(error) if type(error) is ValueError else "it is not a token with an issuer, an end and a key"
            raise Unauthorized(f"the bearer token is not valid: {reason}") from None

    def has_key(self, name: str) -> bool:
        """Whether a token signed with this key can be verified without fetching keys."""
        return name in self._keys and time.monotonic() - self._fetched_at < KEYS_SECONDS

    def fetch(self) -> None:
        """Fetch the provider's current keys. Raises Unavailable if they cannot be fetched."""
        address = self._issuer + "/.well-known/openid-configuration"
        document = _fetched(address)
        if str(document.get("issuer", "")).rstrip("/") != self._issuer:
            raise Unavailable(f"{address} is the document of another issuer: {document.get('issuer')!r}")
        keys_address = str(document.get("jwks_uri", ""))
        if not keys_address.startswith(("https://", "http://127.0.0.1:", "http://localhost:")):
            raise Unavailable(f"{address} names no https address of its keys")
        try:
            keys = jwt.PyJWKSet.from_dict(_fetched(keys_address)).keys[:MOST_KEYS]
        except (jwt.PyJWTError, TypeError, AttributeError) as error:
            raise Unavailable(f"{keys_address} cannot be read: {error!r}") from None
        self._keys = {str(k.key_id): k for k in keys if k.key_id and k.public_key_use in ("sig", None)}
        self._fetched_at = time.monotonic()

    def verify(self, token: str) -> Claims:
        """The token's claims, verified with the fetched keys. Raises Unauthorized."""
        key = self._keys.get(self.key_name(token))
        if key is None:
            raise Unauthorized("the bearer token is not valid: the issuer has no such key")
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                issuer=[self._issuer, self._issuer + "/"],
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise Unauthorized(f"the bearer token is not valid: {error}") from None
        rights = claims.get(self._rights_claim, ())
        if isinstance(rights, str):
            rights = rights.split()
        if not isinstance(rights, list | tuple) or not all(isinstance(right, str) for right in rights):
            raise Unauthorized(f"claim {self._rights_claim} is not a list of rights")
        return Claims(str(claims["sub"]), tuple(rights), float(claims["exp"]) + LEEWAY_SECONDS)


def _part(text: str) -> dict[str, Any]:
    """The decoded header or claims of a token. Raises ValueError."""
    try:
        part = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("it is malformed") from None
    if not isinstance(part, dict):
        raise ValueError("it is malformed")
    return part


def _fetched(address: str) -> dict[str, Any]:
    """The JSON object at an address. Raises Unavailable."""
    try:
        document = json.loads(answer_to(address, FETCH_SECONDS, ANSWER_BYTES))
    except (OSError, ValueError) as error:
        raise Unavailable(f"{address} cannot be read: {error!r}") from None
    if not isinstance(document, dict):
        raise Unavailable(f"{address} has no JSON object")
    return document
