"""The consumers of the benches get every message once, in each shape of the handler."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from notify.bench import clients
from notify.bench.clients import CLIENTS, Run
from notify.bench.load import fill
from notify.bench.requests import subscribe
from notify.testing.process import ServerProcess

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"client": "plain"},
    "threads": {"client": "threads"},
    "threads, typed": {"client": "threads", "typed": True},
    "threads, typed, batch": {"client": "threads", "typed": True, "batch": 50},
    "coroutines, batch": {"client": "coroutines", "batch": 50},
    "coroutines, ordered": {"client": "coroutines", "mode": "ordered"},
    "coroutines, typed, two groups": {"client": "coroutines", "typed": True, "groups": 2},
    "threads, inbox, batch": {"client": "threads", "inbox": True, "batch": 50},
    "coroutines, inbox": {"client": "coroutines", "inbox": True},
}
MESSAGES = 60


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_handler_notes_each_message_once(server: ServerProcess, tmp_path: Path, shape: dict[str, Any]) -> None:
    name = f"bench{uuid.uuid4().hex[:10]}"
    groups = [f"{name}-{n}" for n in range(shape.get("groups", 1))]
    for group in groups:
        subscribe(server.url, group, f"{name}-0", mode=shape.get("mode", "shared"))
    filled = {"url": server.url, "messages": MESSAGES, "body": 100, "topics": 1, "prefix": name, "orders": True}
    asyncio.run(fill(filled | {"keys": 7}))
    spec = {"url": server.url, "topics": [f"{name}-0"], "expected": MESSAGES} | shape | {"groups": groups}
    if shape.get("inbox"):
        spec["inbox"] = f"sqlite:///{tmp_path}/inbox.db"
    run = Run(spec)
    CLIENTS[spec["client"]](run)
    got = clients.result(run)
    assert got["groups"] == [{"group": group, "received": MESSAGES, "unique": MESSAGES} for group in groups]
    assert got["per_second"] > 0
