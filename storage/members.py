"""A member: a running server, bridge, relay or consumer. A registry's database lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Member:
    """One process: a server, bridge, relay or consumer. `load`: requests or rows a second."""

    name: str
    kind: str
    url: str = ""
    roles: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    room: str = ""
    load: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
    seen_us: int = 0
    age: float = 0.0
    """Seconds since its last heartbeat, by the database's clock."""

    def shown(self) -> dict[str, Any]:
        """The member as `GET /v1/members` shows it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "url": self.url,
            "roles": list(self.roles),
            "shards": list(self.shards),
            "room": self.room,
            "load": self.load,
            "age": round(self.age, 3),
            "detail": self.detail,
        }
