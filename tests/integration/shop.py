"""The smallest business: orders, and a session factory to place them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from notify.client.http import HttpClient


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(50))


async def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One JSON request through the SDK's own HTTP client."""
    http = HttpClient(url)
    try:
        answer = await http.call("POST", path, msgspec.json.encode(body), 30, "application/json")
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found
    finally:
        http.close()


def drain(url: str, group: str, topic: str, want: int, wait: float = 3.0) -> list[dict[str, Any]]:
    """Receive and ack until `want` messages came, then look a moment longer for one too many."""
    import asyncio

    async def run() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            patience = wait if len(found) < want else 0.3
            request = {"instance": "test", "topics": [topic], "max": 1000, "wait": patience}
            batch = (await post(url, f"/v1/groups/{group}/receive", request))["messages"]
            if not batch:
                return found
            items = [{"receipt": m["receipt"], "action": "ack"} for m in batch]
            await post(url, f"/v1/groups/{group}/settle", {"items": items})
            found += batch

    return asyncio.run(run())


def subscribe(url: str, group: str, topic: str) -> None:
    """Make the subscription, from now on."""
    assert drain(url, group, topic, 0, 0.01) == []


def eventually(check: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true answer of `check`; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"still {found!r} after {seconds} s"
        time.sleep(0.02)
