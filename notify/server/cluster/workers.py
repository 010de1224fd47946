"""The workers of one machine, as one of them sees them: their addresses, and how to ask another worker."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.client.transport.http import HttpClient
from notify.client.transport.login import TlsFiles
from notify.protocol.wire import JSON
from notify.server.settings import Settings
from notify.storage.members import Member

DIED, HUNG = "died", "hung"
"""How a worker ended that is started again: it died, or it hung and its parent killed it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The earlier processes of a worker, as its parent counted them."""

    counts: Mapping[str, int]
    """How many processes ended, by DIED or HUNG."""
    reason: str = ""
    """Why the last process ended."""


class Workers:
    """The workers of this machine. Their number and addresses stay the same while their parent runs."""

    def __init__(
        self, number: int, urls: Sequence[str], near: Sequence[str], directory: Path, ended: Ended | None = None
    ) -> None:
        """`number`: this worker, counted from 0. `urls`: each worker's address for clients; `near`: for other workers.
        `directory`: the directory that all share. `ended`: the earlier processes of this worker."""
        self.number = number
        self.urls = tuple(urls)
        self.directory = directory
        self.ended = ended or Ended({})
        self.away: tuple[str, ...] = ("another worker",)
        """The workers that do not serve, by the parent's last report; until then at least one may not."""
        self.silent: frozenset[str] = frozenset()
        """The workers that hang, by the parent's last report."""
        self._near = tuple(near)
        self._clients: dict[int, HttpClient] = {}

    def shown(self, settings: Settings, roles: tuple[str, ...]) -> dict[str, Any]:
        """The answer of `GET /v1/members`: a member for each worker, and the shards that divide the keys."""
        names = settings.key_shards
        members = [
            Member(name, "server", url, roles, (name,), settings.room)
            for name, url in zip(names, self.urls, strict=True)
        ]
        return {"version": 1, "members": [member.shown() for member in members], "keys": list(names)}

    async def ask(
        self, settings: Settings, number: int, method: str, target: str, body: bytes, seconds: float, head: str
    ) -> tuple[int, bytes]:
        """Status and body of another worker's answer; `head`: header lines with the caller's token or name.

        Raises Unavailable.
        """
        client = self._clients.get(number)
        if client is None:
            client = HttpClient(self._near[number], tls=_trust(settings))
            self._clients[number] = client
        gives = "text/plain" if target.startswith("/metrics") else JSON
        return await client.ask(method, target, body, seconds, JSON, head, gives)

    async def stop(self) -> None:
        """Close the connections to the other workers."""
        for client in self._clients.values():
            client.close()


def _trust(settings: Settings) -> TlsFiles | None:
    """Trust this server's certificate alone, for any name: all workers have the same certificate."""
    return TlsFiles(settings.tls_certificate, adjust=_trust_itself) if settings.tls_certificate else None


def _trust_itself(context: ssl.SSLContext) -> None:
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
