"""Other versions beside this one, from the repository's history: their code, servers and SDK."""

from __future__ import annotations

import base64
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.testing.process import Child, ServerProcess

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
EARLIER = "a1cb9a57"
"""A version from before: every later one works with its directories, databases and SDK, and its servers with tables of
later ones."""
STATEMENT_END = "\n-- end of statement\n"
FOR_EVER = {"NOTIFY_RETENTION_SECONDS": "315360000"}
"""Ten years, so that retention does not delete the contents of a fixture."""


class NoHistory(Exception):
    """An older version is not available here; tests that need it are skipped with this reason."""


def checkout(commit: str, directory: Path) -> Path:
    """Extract the packages of a commit into a directory. Raises NoHistory if git does not have it."""
    if shutil.which("git") is None:
        raise NoHistory("there is no git")
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "notify", "storage", "spark"], capture_output=True, check=False
    )
    if done.returncode != 0:
        raise NoHistory(f"the repository's history does not have {commit}: {done.stderr.decode()[:200].strip()}")
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


def environment_of(code: Path) -> dict[str, str]:
    """An environment in which Python imports the packages in `code`."""
    return dict(os.environ) | {"PYTHONPATH": str(code)}


def server_of(code: Path, data_dir: Path, flags: Sequence[str] = (), **environment: str) -> ServerProcess:
    """A server that runs the packages in `code`."""
    server = ServerProcess(data_dir, environment=environment, flags=flags)
    server.launch = launched_in(code)  # type: ignore[misc]
    return server


Launch = Callable[[Sequence[str], Mapping[str, str]], Child]


def launched_in(code: Path) -> Launch:
    """A function that starts `notify` from the packages in `code`, for `ServerProcess.launch` and `Command.launch`."""

    def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        # `python -m` looks for packages in the current directory first.
        return subprocess.Popen(
            [sys.executable, "-m", "notify.cli.main", *arguments], cwd=code,
            env=dict(environment) | {"PYTHONPATH": str(code)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    return launch


def run_sdk(code: Path, script: Path, *arguments: str) -> str:
    """The output of a script that runs with the packages in `code`; fails with its last words."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=code, env=environment_of(code), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def earlier_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of that version."""
    try:
        return checkout(EARLIER, tmp_path_factory.mktemp(EARLIER))
    except NoHistory as reason:
        pytest.skip(str(reason))


# --- what fixtures are written as ---------------------------------------------------------------------------------


def pack(directory: Path) -> str:
    """A directory as text: tar, xz, base64."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(directory.rglob("*")):
            archive.add(path, str(path.relative_to(directory)), recursive=False, filter=_plain)
    return base64.encodebytes(lzma.compress(packed.getvalue(), preset=9)).decode()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def unpack(text: str, directory: Path) -> Path:
    """The opposite of `pack`."""
    directory.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(base64.decodebytes(text.encode())))) as archive:
        archive.extractall(directory, filter="data")
    return directory


def service_tables(database: str) -> str:
    """The statements that make the tables of the SDK of that version, and their rows. It made the same tables on MySQL
    and MariaDB."""
    return (FIXTURES / EARLIER / f"service.{'mariadb' if database == 'mysql' else database}.sql").read_text()


def run_statements(engine: sa.Engine, text: str) -> None:
    """Run SQL text, whose statements end with STATEMENT_END, as it stands."""
    raw: Any = engine.raw_connection()
    try:
        cursor = raw.cursor()
        execute: Callable[[str], Any] = cursor.execute
        for statement in text.split(STATEMENT_END):
            if statement.strip():
                execute(statement)
        cursor.close()
        raw.commit()
    finally:
        raw.close()
