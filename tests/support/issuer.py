"""Identity providers: one of OpenID Connect on loopback, and one without keys and signatures."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from notify.server.access.oidc import Claims
from tests.support.answering import Answering, Request, reply


class Issuer:
    """A provider whose one key signs with RS256. `keys` is what it publishes, `document` its discovery document."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        published = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.keys: Any = {"keys": [published | {"kid": "k1", "use": "sig", "alg": "RS256"}]}
        self._server = Answering(self._answer)
        self.url = self._server.url
        self.document: Any = {"issuer": self.url, "jwks_uri": self.url + "/keys"}

    def _answer(self, request: Request) -> None:
        content = self.document if request.path == "/.well-known/openid-configuration" else self.keys
        reply(request, content if isinstance(content, bytes) else json.dumps(content).encode())

    def token(self, key: Any = None, algorithm: str = "RS256", **claims: Any) -> str:
        given = {name: value for name, value in (self.claims() | claims).items() if value is not None}
        return jwt.encode(given, key if key is not None else self.key, algorithm, headers={"kid": "k1"})

    def claims(self) -> dict[str, Any]:
        now = int(time.time())
        return {"iss": self.url, "aud": "notify", "sub": "person", "exp": now + 3600, "iat": now}

    def close(self) -> None:
        self._server.close()


def signed(header: Any, claims: Any, key: Any, algorithm: str) -> str:
    """A token of any header and claims, also such as no library makes; text is taken as JSON."""
    parts = [value.encode() if isinstance(value, str) else json.dumps(value).encode() for value in (header, claims)]
    head = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    proof = jwt.algorithms.get_default_algorithms()[algorithm].sign(head, key)
    return (head + b"." + base64.urlsafe_b64encode(proof).rstrip(b"=")).decode()


class Provider:
    """Believes every token `SUBJECT:RIGHTS`, until the year 2096."""

    def key_name(self, token: str) -> str:
        return "k1"

    def has_key(self, name: str) -> bool:
        return True

    def verify(self, token: str) -> Claims:
        subject, _, rights = token.partition(":")
        return Claims(subject, tuple(rights.split()), 4e9)
