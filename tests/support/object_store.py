"""An S3 server for tests: moto's, in a process of its own, since a store must be able to hang, refuse and end."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from notify.object_store.store import Store
from notify.storage.shipped import manifest
from notify.storage.shipped.manifest import Manifest, StoredObject
from notify.testing.ports import free_port
from tests.support.clock import eventually

BUCKET = "notify-log"


class S3Server:
    """S3 at 127.0.0.1:`port`; its objects live as long as its process. `environment` is what a client of it needs."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"s3://{BUCKET}/prod"
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> S3Server:
        """Wait until it answers, and make the bucket."""
        eventually(self._makes_bucket, "the S3 server to answer")
        return self

    def _makes_bucket(self) -> bool:
        try:
            return self._ask("PUT", f"/{BUCKET}") == 200
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: bytes = b"") -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body)
            return connection.getresponse().status

    def refuse(self, *, after: int) -> None:
        """Answer 403 to every request once so many were made: the keys are of no user. A large number allows all."""
        assert self._ask("POST", "/moto-api/reset-auth", str(after).encode()) == 200

    def hang(self) -> None:
        """Answer nothing any more, and close no connection."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(60)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A running S3 server, and this process with the environment of a client."""
    server = S3Server()
    before = dict(os.environ)
    try:
        os.environ.update(server.environment)
        yield server.wait()
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def listed(url: str) -> Manifest | None:
    """The manifest of a store as it is now."""
    return manifest.load(Store(url))


def untrue(url: str) -> list[str]:
    """The objects that a store lists, and does not have as it lists them."""
    store = Store(url)
    found = manifest.load(store)
    assert found is not None, "the store has no manifest"
    wrong: list[str] = []
    for segment in manifest.segments_from(store, found):
        objects: dict[str, StoredObject | None] = {
            segment.log_name: segment.log,
            segment.index_name: segment.idx,
            segment.parquet_name: segment.parquet,
            segment.checkpoint_name: segment.checkpoint,
        }
        for name, told in objects.items():
            if told is not None and store.digest(name) != (told.size, told.sha256):
                wrong.append(name)
    return wrong


def bodies(url: str, directory: Path) -> list[bytes]:
    """The bodies of all messages in the listed tables, in the order of the log."""
    import pyarrow.parquet as pq

    store = Store(url)
    found = manifest.load(store)
    messages: list[bytes] = []
    for segment in manifest.segments_from(store, found) if found is not None else ():
        copy = directory / "messages.parquet"
        with copy.open("wb") as file:
            assert store.copy_to(segment.parquet_name, file, segment.parquet.size) == (
                segment.parquet.size,
                segment.parquet.sha256,
            )
        messages += pq.read_table(copy, columns=["body"])["body"].to_pylist()
    return messages
