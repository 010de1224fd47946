"""One worker's place among those of its machine: the addresses of all, and whether all are ready."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from notify.server.cluster.membership import shown
from notify.settings import Settings
from notify.storage.sql.registry import Member


class Workers:
    """The workers as one of them knows them. They are the same for as long as their parent runs."""

    def __init__(self, number: int, urls: Sequence[str], directory: Path) -> None:
        """`number`: whose view this is, counted from 0; `urls`: of all; `directory`: the one that all share."""
        self.number = number
        self.urls = tuple(urls)
        self.directory = directory
        self.are_ready = False
        """Whether all of them serve, as the parent said last."""

    def shown(self, settings: Settings, roles: tuple[str, ...]) -> dict[str, Any]:
        """The answer of `GET /v1/members`: a member for each worker, and the shards that divide the keys."""
        names = settings.key_shards
        members = [
            Member(name, "server", url, roles, (name,), settings.room)
            for name, url in zip(names, self.urls, strict=True)
        ]
        return {"version": 1, "members": [shown(member) for member in members], "keys": list(names)}
