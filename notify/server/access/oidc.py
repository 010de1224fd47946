"""Bearer tokens of an OpenID Connect provider, verified by PyJWT against the keys that the provider publishes."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from typing import Any

import jwt
import structlog

from notify.errors import InvalidRequest, Unauthorized, Unavailable
from notify.runtime.timed_call import answer_to
from notify.runtime.urls import has_user, without_secrets

log = structlog.get_logger("notify.server")

FETCH_SECONDS = 5
ALGORITHMS = {
    "RSA": ("RS256", "RS384", "RS512", "PS256"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
    "Ed448": ("EdDSA",),
}
"""The algorithms that are accepted, by the kind of key. Only signatures with a public key: who can verify with a shared
secret can also forge, and `none` signs nothing."""
LEEWAY_SECONDS = 10
TOKEN_BYTES = 16 << 10
"""A longer token is refused without decoding it."""
KEYS_SECONDS = 300.0
"""After this time keys are fetched again; a key that the provider has withdrawn is accepted until then."""
ANSWER_BYTES = 1 << 20
"""The most bytes of the discovery document, and of the keys."""
MOST_KEYS = 100
MOST_KEY_BITS = 16_384
"""A larger RSA key is not used: a signature would be verified for seconds."""
SUBJECT_CHARACTERS = 255
"""The most characters of a subject; the records have no room for more."""
LAST_SECOND = 253_402_300_799
"""The end of the year 9999; nothing that is valid for longer is a time."""


@dataclass(frozen=True, slots=True)
class Key:
    """A provider's public key, and the algorithms that it may be used with."""

    public: Any
    algorithms: tuple[str, ...]


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
        self._keys: dict[str, Key] = {}
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
            if header.get("alg") not in _ALLOWED:
                raise ValueError("its algorithm is not allowed")
            if str(unverified.get("iss")).rstrip("/") != self._issuer:
                raise ValueError("it is from another issuer")
            if self._audience not in (audience if isinstance(audience, list) else [audience]):
                raise ValueError("it is for another audience")
            if not _second(unverified["exp"]) > time.time() - LEEWAY_SECONDS:
                raise ValueError("it has expired")
            if not isinstance(header["kid"], str):
                raise ValueError("it names no key")
            return header["kid"]
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
        keys = _fetched(keys_address).get("keys")
        if not isinstance(keys, list):
            raise Unavailable(f"{keys_address} has no list of keys")
        self._keys = _usable(keys[:MOST_KEYS])
        self._fetched_at = time.monotonic()

    def verify(self, token: str) -> Claims:
        """The token's claims, verified with the fetched keys. Raises Unauthorized."""
        key = self._keys.get(self.key_name(token))
        if key is None:
            raise Unauthorized("the bearer token is not valid: the issuer has no such key")
        try:
            claims = jwt.decode(
                token,
                key.public,
                algorithms=key.algorithms,
                audience=self._audience,
                issuer=[self._issuer, self._issuer + "/"],
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            expires_at = _second(claims["exp"])
        except jwt.InvalidAlgorithmError:
            raise Unauthorized("the bearer token is not valid: its algorithm is not one of its key's") from None
        except (jwt.PyJWTError, ValueError) as error:
            raise Unauthorized(f"the bearer token is not valid: {error}") from None
        except Exception as error:  # what the library or its cryptography does not document; only the token is new here
            raise Unauthorized(f"the bearer token is not valid: it cannot be read ({type(error).__name__})") from None
        subject = str(claims["sub"])
        if not (0 < len(subject) <= SUBJECT_CHARACTERS and subject.isprintable()):
            raise Unauthorized(f"the bearer token is not valid: its subject is not {SUBJECT_CHARACTERS} characters")
        rights = claims.get(self._rights_claim, ())
        if isinstance(rights, str):
            rights = rights.split()
        if not isinstance(rights, list | tuple) or not all(isinstance(right, str) for right in rights):
            raise Unauthorized(f"claim {self._rights_claim} is not a list of rights")
        return Claims(subject, tuple(rights), expires_at + LEEWAY_SECONDS)


_ALLOWED = frozenset(name for names in ALGORITHMS.values() for name in names)


def _usable(keys: list[Any]) -> dict[str, Key]:
    """The keys of a JWK set (RFC 7517) that have a name and verify signatures. A key that cannot be read is left out,
    as the RFC asks; the others are used.
    """
    usable: dict[str, Key] = {}
    for described in keys:
        try:
            kind = described["kty"] if described["kty"] == "RSA" else described["crv"]
            algorithms = ALGORITHMS[kind]
            if described.get("alg") is not None:
                algorithms = tuple(name for name in algorithms if name == described["alg"])
            name, use = described.get("kid"), described.get("use")
            if not (algorithms and name and isinstance(name, str) and use in ("sig", None)):
                continue
            public: Any = jwt.PyJWK(described, algorithms[0]).key
            if getattr(public, "key_size", 0) > MOST_KEY_BITS:
                raise ValueError(f"it has more than {MOST_KEY_BITS} bits")
            usable[name] = Key(public.public_key() if hasattr(public, "public_key") else public, algorithms)
        except Exception as error:
            name = described.get("kid") if isinstance(described, dict) else described
            log.info("provider_key_not_used", key=repr(name)[:100], reason=repr(error)[:200])
    return usable


def _second(value: Any) -> float:
    """A claim as seconds since 1970. Raises ValueError unless it is a number before the year 10000."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LAST_SECOND:  # NaN, too
        raise ValueError("its end is not a time")
    return float(value)


def _part(text: str) -> dict[str, Any]:
    """The decoded header or claims of a token. Raises ValueError."""
    try:
        part = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError):  # of base64, of UTF-8, of JSON, and of numbers with too many digits
        raise ValueError("it is malformed") from None
    if not isinstance(part, dict):
        raise ValueError("it is malformed")
    return part


def _fetched(address: str) -> dict[str, Any]:
    """The JSON object at an address. Raises Unavailable."""
    try:
        document = json.loads(answer_to(address, FETCH_SECONDS, ANSWER_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise Unavailable(f"{address} cannot be read: {error!r}") from None
    if not isinstance(document, dict):
        raise Unavailable(f"{address} has no JSON object")
    return document
