"""One worker's place among those of its machine: the addresses of all, and how it asks another one."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.client.http import HttpClient
from notify.server.cluster.membership import shown
from notify.settings import Settings
from notify.storage.sql.registry import Member
from notify.wire import JSON

DIED, HUNG = "died", "hung"
"""The ends of a worker that is started again: by itself, or hung and killed by its parent."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's forerunners, as its parent remembers them."""

    counts: Mapping[str, int]
    """How many there were, by what ended each: DIED or HUNG."""
    reason: str = ""
    """Why the last of them ended."""


class Workers:
    """The workers as one of them knows them. They are the same for as long as their parent runs."""

    def __init__(
        self, number: int, urls: Sequence[str], near: Sequence[str], directory: Path, ended: Ended | None = None
    ) -> None:
        """`number`: whose view this is, counted from 0; `urls`: where clients reach each, `near`: where the others do;
        `directory`: the one that all share; `ended`: of those that had this one's place before."""
        self.number = number
        self.urls = tuple(urls)
        self.directory = directory
        self.ended = ended or Ended({})
        self.away: tuple[str, ...] = ("another worker",)
        """Those that do not serve, as the parent said last; before it said anything some may not."""
        self.silent: frozenset[str] = frozenset()
        """Those of them that hang, as far as the parent can see."""
        self._near = tuple(near)
        self._clients: dict[int, HttpClient] = {}

    def shown(self, settings: Settings, roles: tuple[str, ...]) -> dict[str, Any]:
        """The answer of `GET /v1/members`: a member for each worker, and the shards that divide the keys."""
        names = settings.key_shards
        members = [
            Member(name, "server", url, roles, (name,), settings.room)
            for name, url in zip(names, self.urls, strict=True)
        ]
        return {"version": 1, "members": [shown(member) for member in members], "keys": list(names)}

    async def ask(
        self, settings: Settings, number: int, method: str, target: str, body: bytes, seconds: float, head: str
    ) -> tuple[int, bytes]:
        """Status and body of another worker's answer; `head`: lines that say who asks. Raises Unavailable."""
        client = self._clients.get(number)
        if client is None:
            client = HttpClient(self._near[number], tls=_trust(settings))
            self._clients[number] = client
        return await client.ask(method, target, body, seconds, JSON, head)

    async def stop(self) -> None:
        """Cut the connections to the others."""
        for client in self._clients.values():
            client.close()


def _trust(settings: Settings) -> ssl.SSLContext | None:
    """Believe the certificate of this server alone: it is the others', too, whatever name it is for."""
    if not settings.tls_certificate:
        return None
    context = ssl.create_default_context(cafile=settings.tls_certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
