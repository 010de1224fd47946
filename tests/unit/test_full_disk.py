"""A disk without room: what is kept beside the log leaves nothing behind, and a refused write says why."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.testclient import TestClient

from notify.server import kept_file
from notify.server.problems import answer_errors


def test_a_file_that_does_not_fit_leaves_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "charts"
    kept_file.put(path, b"before")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("notify.server.kept_file.os.fsync", fsync)
        with pytest.raises(OSError, match="No space"):
            kept_file.put(path, b"after")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"charts": b"before"}
    kept_file.put(path, b"after")
    assert path.read_bytes() == b"after" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_was_left_readable_is_closed(tmp_path: Path) -> None:
    left = tmp_path / "charts.new"
    left.write_bytes(b"left by a server that was killed")
    left.chmod(0o644)
    kept_file.put(tmp_path / "charts", b"now")
    assert stat.S_IMODE((tmp_path / "charts").stat().st_mode) == 0o600 and not left.exists()


def test_a_write_that_the_records_have_no_room_for_is_507(tmp_path: Path) -> None:
    """It was answered with 503, and said that the database does not answer."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/admin.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE action (what TEXT)")
    api = FastAPI()
    answer_errors(api)

    @api.put("/v1/admin/thing")
    def put() -> Any:
        with engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 2")
            connection.exec_driver_sql("INSERT INTO action VALUES (?)", ("x" * 100_000,))

    answer = TestClient(api, raise_server_exceptions=False).put("/v1/admin/thing")
    engine.dispose()
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
