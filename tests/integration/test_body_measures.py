"""Large bodies are counted by the process that stores, reads or sweeps them, with OpenTelemetry's meters."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from notify.client import Message, TransactionProducer
from notify.client.bodies.reading import BODY_BYTES, BodyReader
from notify.errors import BodyUnavailable, ObjectStoreFailed
from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER
from notify.protocol.message import ReceivedMessage
from notify.runtime.measures import MEASURES
from notify.testing import InMemoryServer
from tests.support.answering import Request, answering, body_of, reply
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli
from tests.support.groups import Caller, subscribe
from tests.support.stored_bodies import LARGE, BodyStore


@pytest.fixture(scope="module")
def meters() -> InMemoryMetricReader:
    """The reader of the process's meter provider, which cannot be replaced."""
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    return reader


def figures(meters: InMemoryMetricReader) -> dict[tuple[str, str], float]:
    """Each metric's sum (of a duration: how many there were), by its name and its outcome."""
    data = meters.get_metrics_data()
    found: dict[tuple[str, str], float] = {}
    for metric in (m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics) if data else ():
        for point in metric.data.data_points:
            value: Any = point.count if hasattr(point, "count") else point.value
            found[metric.name.removeprefix("notify.bodies."), str(point.attributes.get("outcome", ""))] = value
    return found


def test_what_becomes_of_each_body_is_counted(
    meters: InMemoryMetricReader, memory: InMemoryServer, tmp_path: Path, unique: str
) -> None:
    store = BodyStore(tmp_path / "store")
    subscribe(memory.url, unique, unique)
    with TransactionProducer(memory.url, group=unique, store=store.url) as producer:
        for _ in range(3):
            producer.publish(Message(unique, bytes(LARGE)))
        producer.publish(Message(unique, b"small"))
        shutil.move(store.directory, tmp_path / "away")
        store.directory.write_text("no directory any more")
        with pytest.raises(ObjectStoreFailed):
            producer.publish(Message(unique, bytes(LARGE)))
    store.directory.unlink()
    shutil.move(tmp_path / "away", store.directory)
    counted = figures(meters)
    assert counted["uploads", "stored"] == 3 and counted["uploads", "failed"] == 1
    assert counted["uploaded", ""] == 3 * LARGE and counted["upload.duration", ""] == 3

    rows = Caller(memory.url, unique, "i").receive(unique, wait=30, max=4)
    received = [
        ReceivedMessage(row["id"], unique, 0, row["offset"], row["body"].encode(), None, None, row["headers"], 1, "")
        for row in rows
        if row.get("headers")
    ]
    reader = BodyReader(store.url, BODY_BYTES)
    assert len(reader.read(received[0]).body) == LARGE
    store.path(sorted(store.names())[0]).write_bytes(b"x" * LARGE)
    store.path(sorted(store.names())[1]).unlink()
    for message in received:
        with suppress(BodyUnavailable):
            reader.read(message)
    reader.close()
    counted = figures(meters)
    assert [counted["reads", outcome] for outcome in ("read", "body_missing", "body_altered")] == [2, 1, 1]
    assert counted["read", ""] == 2 * LARGE and counted["read.duration", ""] == 2


def test_a_sweep_counts_what_it_deletes_and_spares(
    meters: InMemoryMetricReader, memory: InMemoryServer, tmp_path: Path, unique: str
) -> None:
    store = BodyStore(tmp_path / "store")
    sweep = ("store", "sweep", store.url, "--url", memory.url, "--group", unique, "--min-age", "3600", "--json")
    with TransactionProducer(memory.url, group=unique, store=store.url) as producer:
        producer.publish(Message(unique, bytes(LARGE)))
        Store(store.url).replace(f"{FOLDER}/{unique}/half/01900000-0000-7000-8000-000000000001", bytes(LARGE))
        store.age()
        producer.publish(Message(unique, bytes(LARGE)))
    assert cli(*sweep, "--dry-run")[1]["swept"] == 1
    assert not any(name.startswith(("sweep", "swept", "freed")) for name, _ in figures(meters)), "nothing was deleted"
    status, answer = cli(*sweep)
    assert status == 0 and answer["swept"] == 1, answer
    counted = figures(meters)
    assert [counted["swept", outcome] for outcome in ("deleted", "named", "young")] == [1, 1, 1]
    assert counted["freed", ""] == LARGE and counted["sweeps", "done"] == 1
    assert cli(*sweep, "--url", "http://127.0.0.1:9")[0] == 2
    assert figures(meters)["sweeps", "failed"] == 1


def test_a_sweep_exports_its_counts_before_it_ends(memory: InMemoryServer, tmp_path: Path, unique: str) -> None:
    """Nobody could scrape a command that runs for some seconds a day."""
    store = BodyStore(tmp_path / "store")
    Store(store.url).replace(f"{FOLDER}/{unique}/half/01900000-0000-7000-8000-000000000001", b"orphan")
    store.age()
    words = ("store", "sweep", store.url, "--url", memory.url, "--group", unique, "--min-age", "3600", "--gone")
    posted: list[tuple[str, bytes]] = []

    def collect(request: Request) -> None:
        posted.append((request.path, body_of(request)))
        reply(request)

    with answering(collect) as collector:
        environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        command = [sys.executable, "-m", "notify.cli.main", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS)
    assert done.returncode == 0 and "1 (6 B) deleted" in done.stdout, done
    ((path, body),) = posted
    body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    assert path == "/v1/metrics" and b"notify.bodies.swept" in body and b"deleted" in body


def test_the_reference_has_every_measure() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert [m.name for m in MEASURES if f"| `{m.name}" not in text] == []
