"""The image's Dockerfile, without an engine: its layers, its requirements, and its health check."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from notify.runtime import alive

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


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


def test_the_health_check_looks_at_the_file_that_processes_touch() -> None:
    assert f"ENV {alive.FILE}=/tmp/alive" in TEXT
    (check,) = re.findall(r"HEALTHCHECK .*?CMD \[(.*?)\]$", TEXT, re.DOTALL | re.MULTILINE)
    assert "/tmp/alive" in check and "> 60" in check and alive.BEAT_SECONDS * 4 < 60
