"""A credential: what someone shows to be let in, and what it lets them do. Records
keep it (notify/server/configuration/records.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Credential:
    """A credential as it is recorded. `proof`: the SHA-256 of a token, else the certificate's or subject's name."""

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
        """Whether it lets anyone in at this time; `expires_us` 0: it does not expire."""
        return not self.revoked_us and (not self.expires_us or now_us < self.expires_us)
