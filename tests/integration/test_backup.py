"""A backup under load, restored elsewhere, is a prefix of the log with all that was acknowledged before it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from notify.cli.backup import backup as backup_command
from notify.cli.restore import restore as restore_command
from notify.client import Message, Reader, TransactionProducer
from notify.errors import InvalidRequest, NotifyError
from notify.testing.process import ServerProcess
from tests.support.answering import answering, reply
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.http import REASON, admin, ask, post
from tests.support.servers import Guarded, stop_if_running

WRITERS = 6


def backup(directory: Path, url: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the output of `notify backup`."""
    return cli("backup", str(directory), "--url", url, "--reason", REASON, "--json")


def restore(directory: Path, data_dir: Path) -> tuple[int, dict[str, Any]]:
    return cli("restore", str(directory), "--data-dir", str(data_dir), "--json")


class Writers:
    """Producers in threads; `sent` has the acknowledged bodies of each, in order."""

    def __init__(self, url: str) -> None:
        self.sent: list[list[str]] = [[] for _ in range(WRITERS)]
        self._stop = threading.Event()
        self._producer = TransactionProducer(url, group="writers")
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def _write(self, number: int) -> None:
        n = 0
        while not self._stop.is_set():
            body = f"{number}-{n}"
            n += 1
            try:
                self._producer.publish(Message(f"t{number % 3}", body + "." * 3000, key=str(number)))
            except NotifyError:
                continue  # a slow machine: the message may be stored, and is not acknowledged
            self.sent[number].append(body)

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


@pytest.mark.long
@pytest.mark.parametrize(("segment_bytes", "count"), [(1 << 20, 250), (256 << 20, 50)])
def test_a_backup_under_load_is_restored_whole(tmp_path: Path, segment_bytes: int, count: int) -> None:
    """With small segments the log seals, checkpoints and drops files while they are copied."""
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_SEGMENT_BYTES": str(segment_bytes)}).start()
    restored = ServerProcess(tmp_path / "elsewhere")
    try:
        writers = Writers(server.url)
        try:
            before: set[str] = set()
            for n in range(3):
                enough = len(before) + count
                eventually(lambda enough=enough: len(writers.acknowledged()) >= enough, f"{enough} messages")
                before = writers.acknowledged()
                code, made = backup(tmp_path / f"b{n}", server.url)
                assert code == 0, made
                assert made["files"] >= 2
        finally:
            writers.stop()
        assert admin(server.url, "GET", "backups")["backups"] == []  # the server keeps no snapshot
        assert (len(list((tmp_path / "b2" / "log").glob("*.log"))) > 1) is (segment_bytes == 1 << 20)
        code, copy = restore(tmp_path / "b2", tmp_path / "elsewhere")
        assert code == 0, copy
        assert copy["damages"] == [] and copy["messages"] >= len(before)
        original = contents(server.url)
        restored.start()
        copied = contents(restored.url)
        assert before <= {body for bodies in copied.values() for body in bodies}
        for topic, bodies in copied.items():
            assert bodies == original[topic][: len(bodies)]
        post(restored.url, "/v1/messages", {"messages": [{"topic": "t0", "body": "goes on"}]})
        assert "backup.make" in {action["what"] for action in admin(restored.url, "GET", "actions")["actions"]}
    finally:
        server.stop()
        stop_if_running(restored)


def test_a_directory_that_is_not_a_backup_is_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
    try:
        for _ in range(3):
            post(server.url, "/v1/messages", {"messages": [{"topic": "t", "body": "x" * 50_000}] * 20})
        copy = tmp_path / "b"
        assert backup(copy, server.url)[0] == 0
        assert "exists: name" in backup(copy, server.url)[1]["text"]
        assert "not empty" in restore(copy, tmp_path / "data")[1]["text"]
        assert "is not a backup" in restore(tmp_path, tmp_path / "n")[1]["text"]
        segment = min((copy / "log").glob("*.log"))
        sound = segment.read_bytes()
        wrong = bytearray(sound)
        wrong[len(wrong) // 2] ^= 1
        segment.write_bytes(wrong)
        code, damaged = restore(copy, tmp_path / "wrong")
        assert code == 1 and len(damaged["damages"]) >= 1
        segment.write_bytes(sound[:-7])
        code, refused = restore(copy, tmp_path / "cut")
        assert code == 2 and "its size has changed" in refused["text"]
        assert not (tmp_path / "cut").exists()
        for path in ("nothing", "20260101T000000-000000Z", "..", "%2e%2e"):
            assert ask(server.url, "GET", f"/v1/admin/backups/{path}/files/admin.db")[0] == 404
    finally:
        server.stop()


def test_a_log_on_another_disk_is_copied(tmp_path: Path, other_disk: Path) -> None:
    """A link cannot lead there, and no backup was made. The same holds where a file system has no hard links."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "log").symlink_to(other_disk)
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
    try:
        for _ in range(3):
            post(server.url, "/v1/messages", {"messages": [{"topic": "t", "body": "x" * 50_000}] * 20})
        code, made = backup(tmp_path / "b", server.url)
    finally:
        server.stop()
    assert code == 0, made
    code, copy = restore(tmp_path / "b", tmp_path / "restored")
    assert (code, copy["damages"], copy["messages"]) == (0, [], 60), copy


def test_a_backup_has_the_log_of_one_server(tmp_path: Path, server: ServerProcess) -> None:
    """The server that answered made the backup, and its files were fetched from the first address."""
    code, refused = backup(tmp_path / "b", f"http://127.0.0.1:1,{server.url}")
    assert code == 2 and "one server" in refused["text"]
    assert admin(server.url, "GET", "backups")["backups"] == []


def test_a_restore_that_is_cut_off_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut restore leaves nothing that a server starts on. It copied in place and synced nothing."""
    copy, data_dir = tmp_path / "copy", tmp_path / "restored"
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
    try:
        for _ in range(3):
            post(server.url, "/v1/messages", {"messages": [{"topic": "t", "body": "x" * 50_000}] * 20})
        assert backup(copy, server.url)[0] == 0
    finally:
        server.stop()
    copied: list[Path] = []
    synced: set[int] = set()
    copy_file, sync = shutil.copyfile, os.fsync

    def cut_off(source: Path, target: Path) -> Path:
        if copied:
            raise OSError("the machine stopped")
        copied.append(target)
        return copy_file(source, target)

    def noted(handle: int) -> None:
        sync(handle)
        if not (data_dir / "log").exists():
            synced.add(os.fstat(handle).st_ino)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", cut_off)
        with pytest.raises(OSError, match="stopped"):
            restore_command(copy, data_dir, "", None, True)
    assert copied[0].exists() and not (data_dir / "log").exists()
    monkeypatch.setattr(os, "fsync", noted)
    restore_command(copy, data_dir, "", None, True)
    restored = [path for path in data_dir.rglob("*") if path.is_file()]
    assert {path.name for path in restored} >= {path.name for path in (copy / "log").iterdir()}
    assert {path.stat().st_ino for path in restored} <= synced
    assert not copied[0].exists()


def test_snapshots_are_few_and_their_files_stay_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded(tmp_path / "data")
    try:
        status, made = ask(guarded.url, "POST", "/v1/admin/backups", {"reason": REASON}, guarded.admin)
        name = made["result"]["name"]
        assert status == 200
        for file in ("../../admin.token", "..%2f..%2fadmin.token", "/etc/passwd", "log/../../../admin.token"):
            assert ask(guarded.url, "GET", f"/v1/admin/backups/{name}/files/{file}", token=guarded.admin)[0] == 404
        viewer = guarded.make("view")
        assert ask(guarded.url, "GET", f"/v1/admin/backups/{name}/files/admin.db", token=viewer)[0] == 403
        monkeypatch.setenv("NOTIFY_TOKEN", guarded.admin)
        code, answer = backup(tmp_path / "b", guarded.url)
        assert code == 0, answer
        assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "b").rglob("*") if path.suffix != ".json")
    finally:
        guarded.server.stop()


OUTSIDE = ("../outside", "/tmp/outside", "log/../../outside", "log//x", ".", "..", "", "log/./x", "a\\..\\b", "x\n")


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_of_a_server_or_an_archive_leads_out_of_the_directory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such names are refused. A hostile server, or a foreign archive, wrote files anywhere."""
    listed = {"name": "b", "files": [{"name": name, "size": 4}]}
    monkeypatch.setattr("notify.cli.backup.send_write", lambda *_, **__: {"result": listed})

    place = tmp_path / "here"
    place.mkdir()
    before = set(tmp_path.rglob("*"))
    with answering(lambda request: reply(request, b"evil")) as server:
        with pytest.raises(InvalidRequest, match="nothing was written"):
            backup_command(place / "copy", REASON, server.url, True)
    assert set(tmp_path.rglob("*")) == before
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "backup.json").write_text(json.dumps(listed))
    for target in (tmp_path / "outside", archive / "outside"):
        target.write_text("four")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(InvalidRequest, match="nothing was written"):
        restore_command(archive, place / "data", "", None, True)
    assert set(tmp_path.rglob("*")) == before


def test_an_archive_with_links_is_not_restored(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("four")
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "log").symlink_to(tmp_path)
    (archive / "backup.json").write_text(json.dumps({"name": "b", "files": [{"name": "log/secret", "size": 4}]}))
    with pytest.raises(InvalidRequest, match="link"):
        restore_command(archive, tmp_path / "data", "", None, True)
    assert not (tmp_path / "data").exists()
