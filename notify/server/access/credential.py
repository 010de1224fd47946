"""A credential: what a caller shows, and its rights. notify/server/configuration/records.py stores it."""

from __future__ import annotations

from dataclasses import dataclass


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
