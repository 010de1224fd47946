"""A credential: what a caller shows, and its rights. notify/server/configuration/records.py stores it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SOON_US = 14 * 86_400_000_000


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential as stored. `proof`: the SHA-256 of the token, or the name of the certificate or subject."""

    id: str
    name: str
    kind: str
    proof: str
    rights: tuple[str, ...]
    requests: float
    polls: int
    created_us: int
    expires_us: int
    revoked_us: int = 0
    used_us: int = 0

    def holds(self, now_us: int) -> bool:
        """Whether it is valid at this time: not revoked, and not expired (`expires_us` 0: it never expires)."""
        return not self.revoked_us and (not self.expires_us or now_us < self.expires_us)

    def ends_soon(self, now_us: int) -> bool:
        """Whether it is in the last fifth of its time, and in its last 14 days."""
        return 0 < self.expires_us < now_us + min(SOON_US, (self.expires_us - self.created_us) // 5)


def ending(credentials: Iterable[Credential], now_us: int) -> list[Credential]:
    """The valid credentials that expire soon: of each name the one that lasts longest, if no other lasts."""
    valid = sorted((c for c in credentials if c.holds(now_us)), key=lambda c: c.expires_us or math.inf)
    return [c for c in {c.name: c for c in valid}.values() if c.ends_soon(now_us)]
