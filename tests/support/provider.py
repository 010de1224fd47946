"""An identity provider without keys and signatures, for tests of what a server does with its tokens."""

from __future__ import annotations

from notify.server.access.oidc import Claims


class Provider:
    """Believes every token `SUBJECT:RIGHTS`, until the year 2096."""

    def key_name(self, token: str) -> str:
        return "k1"

    def has_key(self, name: str) -> bool:
        return True

    def verify(self, token: str) -> Claims:
        subject, _, rights = token.partition(":")
        return Claims(subject, tuple(rights.split()), 4e9)
