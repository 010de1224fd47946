"""Tokens: `nt_ID_SECRET`. The secret has 256 random bits, so that a plain hash of it is safe to keep."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

_TOKEN = re.compile(rb"nt_([0-9a-z]{12})_([A-Za-z0-9_-]{43})\Z")
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_id() -> str:
    """The id of a new credential."""
    return "".join(secrets.choice(_LETTERS) for _ in range(12))


def new_token(number: str) -> tuple[str, str]:
    """A token for the credential of this id, and the proof of the token, which is stored."""
    token = f"nt_{number}_{secrets.token_urlsafe(32)}"
    return token, proof_of(token.encode())


def proof_of(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def id_of(token: bytes) -> str | None:
    """The id of the credential that a token names; None if it is not a token of Notify."""
    match = _TOKEN.match(token)
    return None if match is None else match[1].decode()


def is_proved(token: bytes, proof: str) -> bool:
    return hmac.compare_digest(proof_of(token), proof)
