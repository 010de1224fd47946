"""A project's own packages `storage` and `spark` work beside this package."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.clock import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SUSPICIOUS = re.compile(r"^\s*(?:import|from)\b.*(?<![.\w])(?:storage|spark)\b", re.MULTILINE)
"""A line that may import `storage` or `spark`."""
OWN = {
    "storage/__init__.py": "KEEPS = 'files'\n",
    "storage/log.py": "LINES = []\n",
    "spark/__init__.py": "PLUG = 'a plug'\n",
    "app.py": """
        import sqlalchemy as sa
        import spark
        import storage.log
        from notify.client import Message, TransactionProducer, create_tables, use_explicit_begin
        from notify.testing import InMemoryServer

        engine = sa.create_engine("sqlite:///own.db")
        use_explicit_begin(engine)
        create_tables(engine)
        with InMemoryServer() as server, TransactionProducer(server.url, group="own", engine=engine) as producer:
            with engine.connect() as connection, producer.transaction(connection) as transaction:
                transaction.send(Message("own", b"x"))
        import notify.spark.judge.findings, notify.storage.log.store
        print(storage.KEEPS, storage.log.LINES, spark.PLUG)
    """,
    "test_app.py": """
        import storage

        def test_own(notify_server):
            assert notify_server.url and storage.KEEPS == "files"
    """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in OWN.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.split("\n")
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        path.write_text("\n".join(line[indent:] for line in lines))
    return tmp_path / "project"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("app.py",), "files [] a plug"),
        pytest.param(
            ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "test_app.py"),
            "1 passed",
            marks=pytest.mark.long,
        ),
        pytest.param(("-m", "notify.cli.main", "serve", "--help"), "--data-dir", marks=pytest.mark.long),
        (("-m", "notify.cli.main", "audit", "--help"), "explain"),
    ],
    ids=["sdk, notify.testing and audit", "the pytest fixture", "notify serve", "notify audit"],
)
def test_a_projects_own_packages_go_on_working(project: Path, words: tuple[str, ...], printed: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=project, env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
        capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and printed in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_nothing_but_notify_is_installed() -> None:
    from setuptools.discovery import PEP420PackageFinder  # 0.3 s of CPU, which each worker would pay to collect

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = PEP420PackageFinder.find(str(ROOT), include=settings["packages"]["find"]["include"])
    assert {package.partition(".")[0] for package in packages} == {"notify"}
    assert {"notify.storage.log", "notify.storage.sql.migrations.versions", "notify.spark"} <= set(packages)


def test_nothing_imports_these_by_another_name() -> None:
    """No module imports `storage` or `spark` by these names: that would load every module a second time."""
    places = [path for room in ("notify", "storage", "spark", "tests") for path in (ROOT / room).rglob("*.py")]
    assert len(places) > 300
    for path in places:
        text = path.read_text()
        if not SUSPICIOUS.search(text):  # parsing all of them takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"storage", "spark"}, (path, names)
