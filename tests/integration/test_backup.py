"""A backup taken while producers write, restored elsewhere: a prefix that holds everything acknowledged before it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from notify.client import Message, Reader, TransactionProducer
from notify.testing.process import ServerProcess
from tests.support.http import ask
from tests.support.servers import Guarded

WHY = {"reason": "a test"}


def cli(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, Any, str]:
    """Exit code, what was printed as JSON, and what was said otherwise."""
    import os

    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", *arguments, "--json"],
        capture_output=True, text=True, timeout=60, env=os.environ | (environment or {}),
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


class Writers:
    """Producers in threads; `sent` are the bodies that were acknowledged, in order for each."""

    def __init__(self, url: str, count: int) -> None:
        self.sent: list[list[str]] = [[] for _ in range(count)]
        self._stop = threading.Event()
        self._producer = TransactionProducer(url, group="writers")
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _write(self, number: int) -> None:
        n = 0
        while not self._stop.is_set():
            body = f"{number}-{n}"
            self._producer.publish(Message(f"t{number % 3}", body + "." * 500, key=str(number)))
            self.sent[number].append(body)
            n += 1

    def acknowledged(self) -> set[str]:
        return {body for bodies in self.sent for body in list(bodies)}

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._producer.close()


def contents(url: str) -> dict[str, list[str]]:
    reader = Reader(url)
    try:
        return {f"t{n}": [m.text.rstrip(".") for m in reader.read(f"t{n}")] for n in range(3)}
    finally:
        reader.close()


@pytest.mark.parametrize("segment_bytes", [1 << 20, 256 << 20])
def test_a_backup_under_load_is_restored_whole(tmp_path: Path, segment_bytes: int) -> None:
    """Small segments: files are sealed, checkpointed and dropped while they are copied."""
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_SEGMENT_BYTES": str(segment_bytes)}).start()
    restored = None
    try:
        writers = Writers(server.url, 12)
        try:
            before: set[str] = set()
            for n in range(3):
                while len(before) < 500 * (n + 1):
                    before = writers.acknowledged()
                code, made, error = cli("backup", str(tmp_path / f"b{n}"), "--url", server.url, "--reason", "nightly")
                assert code == 0, error
                assert made["files"] >= 2
        finally:
            writers.stop()
        assert ask(server.url, "GET", "/v1/admin/backups")[1]["backups"] == []  # nothing is left on the server
        code, found, error = cli("restore", str(tmp_path / "b2"), "--data-dir", str(tmp_path / "elsewhere"))
        assert code == 0, error
        assert found["damages"] == [] and found["messages"] >= len(before)
        original = contents(server.url)
        restored = ServerProcess(tmp_path / "elsewhere").start()
        copied = contents(restored.url)
        assert before <= {body for bodies in copied.values() for body in bodies}
        for topic, bodies in copied.items():
            assert bodies == original[topic][: len(bodies)]
        status, _ = ask(restored.url, "POST", "/v1/messages", {"messages": [{"topic": "t0", "body": "goes on"}]})
        assert status == 200
        _, actions = ask(restored.url, "GET", "/v1/admin/actions")
        assert "backup.make" in {a["what"] for a in actions["actions"]}
    finally:
        server.stop()
        if restored is not None:
            restored.stop()


def test_what_is_no_backup_is_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
    try:
        body = "x" * 50_000
        for _ in range(3):
            ask(server.url, "POST", "/v1/messages", {"messages": [{"topic": "t", "body": body}] * 20})
        backup = tmp_path / "b"
        assert cli("backup", str(backup), "--url", server.url, "--reason", "r")[0] == 0
        assert "exists already" in cli("backup", str(backup), "--url", server.url, "--reason", "r")[2]
        assert "not empty" in cli("restore", str(backup), "--data-dir", str(tmp_path / "data"))[2]
        assert "no backup" in cli("restore", str(tmp_path), "--data-dir", str(tmp_path / "n"))[2]
        segment = min((backup / "log").glob("*.log"))
        sound = segment.read_bytes()
        wrong = bytearray(sound)
        wrong[len(wrong) // 2] ^= 1
        segment.write_bytes(wrong)
        code, found, _ = cli("restore", str(backup), "--data-dir", str(tmp_path / "wrong"))
        assert code == 1 and len(found["damages"]) >= 1
        segment.write_bytes(sound[:-7])
        code, _, error = cli("restore", str(backup), "--data-dir", str(tmp_path / "cut"))
        assert code == 2 and "another size" in error
        assert not (tmp_path / "cut").exists()
        for path in ("nothing", "20260101T000000-000000Z", "..", "%2e%2e"):
            assert ask(server.url, "GET", f"/v1/admin/backups/{path}/files/admin.db")[0] == 404
    finally:
        server.stop()


def test_snapshots_are_few_and_their_files_stay_inside(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "data")
    try:
        status, made = ask(guarded.url, "POST", "/v1/admin/backups", WHY, guarded.admin)
        name = made["result"]["name"]
        assert status == 200
        for file in ("../../admin.token", "..%2f..%2fadmin.token", "/etc/passwd", "log/../../../admin.token"):
            assert ask(guarded.url, "GET", f"/v1/admin/backups/{name}/files/{file}", token=guarded.admin)[0] == 404
        viewer = guarded.make("view")
        assert ask(guarded.url, "GET", f"/v1/admin/backups/{name}/files/admin.db", token=viewer)[0] == 403
        code, _, error = cli(
            "backup", str(tmp_path / "b"), "--url", guarded.url, "--reason", "r",
            environment={"NOTIFY_TOKEN": guarded.admin},
        )  # fmt: skip
        assert code == 0, error
        assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "b").rglob("*") if path.suffix != ".json")
    finally:
        guarded.server.stop()
