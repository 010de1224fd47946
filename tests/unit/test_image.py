"""The images' Dockerfiles, without an engine: what they copy and install, their layers, and the health check."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from notify.runtime import alive

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
AUDIT_TEXT = (ROOT / "docs" / "kubernetes" / "Dockerfile").read_text()
IMAGES = pytest.mark.parametrize("text", [TEXT, AUDIT_TEXT], ids=["server", "audit"])


def copied(text: str) -> list[str]:
    """The paths of the repository that a Dockerfile copies."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    return [path for line in lines for path in line.split()]


@IMAGES
def test_files_copied_into_the_image_exist(text: str) -> None:
    """Without .dockerignore the engine got the environments, too: gigabytes."""
    ignored, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    sent = {line[1:] for line in rest if line.startswith("!")}
    assert ignored == "*" and set(copied(text)) <= sent
    assert [path for path in sent if not (ROOT / path).exists()] == []


@IMAGES
def test_the_image_has_a_python_and_extras_that_this_package_knows(text: str) -> None:
    """Spark's image has Python 3.10: pip refused this package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = re.findall(r"^FROM python:(\S+)-slim$", text, re.MULTILINE)[-1]
    assert python in SpecifierSet(project["requires-python"])
    assert text.rindex("FROM") == text.index(f"FROM python:{python}"), "another base gives the Python"
    extras = {extra for found in re.findall(r"'\.\[(.*?)\]'", text) for extra in found.split(",")}
    assert extras <= set(project["optional-dependencies"])


def test_the_audits_image_has_the_spark_of_its_python_package() -> None:
    (version,) = re.findall(r"^pyspark==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"FROM apache/spark:{version}-python3 AS spark\n" in AUDIT_TEXT
    assert "ENTRYPOINT [" in AUDIT_TEXT, "Kubernetes starts an executor by the image's entry point"


def requirements() -> list[str]:
    """The lines that the first RUN writes to requirements.txt."""
    (program,) = re.findall(r'RUN python -c "(.*?)"', TEXT, re.DOTALL)
    joined = program.replace("\\\n", "")  # as Docker joins lines
    command = [sys.executable, "-c", joined]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_dependencies_are_a_layer_before_the_code() -> None:
    """Each change of the code installed all dependencies again."""
    steps = re.findall(r"^(?:COPY|RUN) .*", TEXT, re.MULTILINE)
    code = next(n for n, step in enumerate(steps) if step == "COPY notify notify")
    before = [step for step in steps[:code] if step.startswith("COPY")]
    assert before[0] == "COPY pyproject.toml constraints.txt ./"
    assert steps[code + 2] == "RUN pip install --no-cache-dir --no-deps ."


def test_the_image_has_what_compose_and_manifests_wire() -> None:
    """The manifests named a store to ship to, and the image lacked the extra `ship`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(line).name for line in requirements()}
    wanted = set(project["dependencies"])
    for extra in ("server", "cli", "sql", "bridge", "kafka", "postgresql", "mysql", "ship", "store", "zstd"):
        wanted |= set(project["optional-dependencies"][extra])
    assert names == {Requirement(line).name for line in wanted} - {"notify-tx"}
    assert {"s3fs", "confluent-kafka", "psycopg", "uvicorn"} <= names


def test_the_health_check_looks_at_the_file_that_processes_touch(tmp_path: Path) -> None:
    assert f"ENV {alive.FILE}=/tmp/alive" in TEXT and alive.BEAT_SECONDS * 4 < 60
    (check,) = re.findall(r"HEALTHCHECK .*?CMD (\[.*?\])$", TEXT, re.DOTALL | re.MULTILINE)
    file = tmp_path / "alive"
    python, *words = json.loads(check)
    assert python == "python" and "/tmp/alive" in words[-1]
    command = [sys.executable, *(word.replace("/tmp/alive", str(file)) for word in words)]

    def is_healthy() -> bool:
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0

    assert not is_healthy()
    file.touch()
    assert is_healthy()
    os.utime(file, (time.time() - 61,) * 2)
    assert not is_healthy()


@pytest.mark.long
def test_the_package_works_from_what_the_image_copies(tmp_path: Path) -> None:
    """notify/storage and notify/spark are links, and the image copies only the one that it needs."""
    context, installed = tmp_path / "context", tmp_path / "installed"
    context.mkdir()
    for name in copied(TEXT):
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, context / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", installed, context], check=True)
    assert not (installed / "notify" / "spark").exists()
    program = (
        "import notify, sqlalchemy, notify.storage.sql.schema as schema\n"
        "from notify.testing import ServerProcess\n"
        "from notify.server.console.open_pages import open_page\n"
        f"assert notify.__file__.startswith({str(installed)!r}) and open_page('/static/console.css', b'', [])\n"
        f"schema.upgrade(sqlalchemy.create_engine('sqlite:///{tmp_path}/x.db'), 'main')\n"
        f"ServerProcess(__import__('pathlib').Path({str(tmp_path)!r}) / 'data').start().stop()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
