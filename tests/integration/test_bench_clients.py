"""The consumers of the benches get every message once, in each shape of the handler."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from notify.cli.bench import consumers
from notify.cli.bench.consumers import Run, WireGroup
from notify.cli.bench.runner import subscribe
from notify.protocol.wire import RUN_HEAD, DeliveredRun, Payload
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tools.bench.clients import CLIENTS
from tools.bench.fill import fill

SHAPES: dict[str, dict[str, Any]] = {
    "wire": {"client": "wire"},
    "wire, two groups": {"client": "wire", "groups": 2},
    "plain": {"client": "plain"},
    "plain, runs": {"client": "plain_runs"},
    "threads": {"client": "threads"},
    "threads, typed": {"client": "threads", "typed": True},
    "threads, typed, batch": {"client": "threads", "typed": True, "batch": 50},
    "coroutines, batch": {"client": "coroutines", "batch": 50},
    "coroutines, ordered": {"client": "coroutines", "mode": "ordered"},
    "coroutines, typed, two groups": {"client": "coroutines", "typed": True, "groups": 2},
    "threads, inbox, batch": {"client": "threads", "inbox": True, "batch": 50},
    "coroutines, inbox": {"client": "coroutines", "inbox": True},
}
MESSAGES, BODY = 60, 100


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_handler_notes_each_message_once(server: ServerProcess, tmp_path: Path, shape: dict[str, Any]) -> None:
    name = f"bench{uuid.uuid4().hex[:10]}"
    groups = [f"{name}-{n}" for n in range(shape.get("groups", 1))]
    for group in groups:
        subscribe(server.url, group, f"{name}-0", mode=shape.get("mode", "shared"))
    filled = {"url": server.url, "messages": MESSAGES, "body": BODY, "topics": 1, "prefix": name, "orders": True}
    asyncio.run(fill(filled | {"keys": 7}))
    spec = {"url": server.url, "topics": [f"{name}-0"], "expected": MESSAGES} | shape | {"groups": groups}
    if shape.get("inbox"):
        spec["inbox"] = f"sqlite:///{tmp_path}/inbox.db"
    run = Run(spec)
    CLIENTS[spec["client"]](run)
    got = consumers.result(run)
    for group, figures in zip(groups, got["groups"], strict=True):
        assert (figures["group"], figures["received"], figures["unique"]) == (group, MESSAGES, MESSAGES)
        if shape["client"] == "wire":
            assert figures["body_bytes"] == MESSAGES * BODY
    assert got["delivered"] == MESSAGES * len(groups)
    assert got["per_second"] > 0


@pytest.mark.parametrize(("before", "counted"), [(2, 7), (5, 10)], ids=["late by little", "late by half"])
def test_the_clock_starts_when_the_last_group_has_messages(before: int, counted: int) -> None:
    """As in the peers' drivers, only what comes then counts; where more than half came before, all of it does."""
    run = Run({"client": "plain", "groups": ["quick", "late"], "expected": 5})
    quick, late = run.groups
    quick.note_all(range(before))
    late.note(0)
    quick.note_all(range(before, 5))
    late.note_all(range(1, 5))
    assert run.is_over
    assert run.counted == counted


def test_a_run_says_whether_its_time_was_over() -> None:
    """Its seconds begin a little after its timer: what it had no time for was said to be lost."""
    is_over = threading.Event()
    cut, whole = (Run({"client": "plain", "groups": ["g"], "expected": 5, "seconds": s}) for s in (0.01, 3600.0))
    cut.stops.append(is_over.set)
    cut.groups[0].note(0)
    assert is_over.wait(PATIENCE_SECONDS)
    whole.groups[0].note_all(range(5))
    assert (cut.is_cut, whole.is_over, whole.is_cut) == (True, True, False)


def test_the_wires_client_says_which_messages_come_twice() -> None:
    run = Run({"client": "wire", "groups": ["g"], "expected": 8})
    group = run.groups[0]
    assert isinstance(group, WireGroup)

    def messages(first: int, ids: Iterable[int]) -> DeliveredRun:
        heads = b"".join(RUN_HEAD.pack(number.to_bytes(16), 0, 1) for number in ids)
        payloads = [Payload(topic="t", body=b"1234") for _ in range(len(heads) // RUN_HEAD.size)]
        return DeliveredRun(lease="1", queue=0, offsets=[(first, len(payloads))], heads=heads, messages=payloads)

    group.note_runs([messages(0, range(3))])
    assert (group.figures()["received"], group.figures()["unique"]) == (3, 3)
    group.note_runs([messages(2, range(2, 4))])
    assert (group.figures()["received"], group.figures()["unique"]) == (5, 4), "the same offset"
    group.note_runs([messages(4, [9, 9, 9])])
    assert (group.figures()["received"], group.figures()["unique"]) == (8, 5), "the same id"
    assert group.figures()["body_bytes"] == 8 * 4
    assert run.is_over
