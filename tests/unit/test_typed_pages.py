"""The code of the guides and the example service passes strict type checkers, as a reader's own code has to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages

ROOT = Path(__file__).parents[2]
TYPED = sorted(page for page in pages.pages() if page.startswith(("guides/", "migrate/")) or page == "errors.md")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one module for each page that has Python, and the example service."""
    directory = tmp_path_factory.mktemp("pages")
    for page in TYPED:
        if code := "\n".join(pages.blocks(page, "python")):
            (directory / page.replace("/", "_").replace("-", "_").replace(".md", ".py")).write_text(code)
    assert len(list(directory.glob("*.py"))) >= 10
    shutil.copytree(ROOT / "docs" / "example" / "shop", directory / "shop")
    return directory


def mypy(directory: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    """Check files with the project's own settings, which are strict; `make check` has left what it knows of Notify."""
    words = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    words += ["--cache-dir", str(ROOT / ".mypy_cache"), *map(str, files)]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=directory, env={"MYPYPATH": str(ROOT)}, check=False
    )


@pytest.mark.long
def test_mypy_is_strict_with_them(modules: Path, tmp_path: Path) -> None:
    """It finds the one fault that is planted in a copy of a page, and no other."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text((modules / "guides_order.py").read_text() + 'consumer.subscribe("order", mode="orderd")\n')
    done = mypy(modules, *sorted(modules.rglob("*.py")), wrong)
    faults = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.returncode == 1 and len(faults) == 1, done.stdout + done.stderr
    assert "wrong.py" in faults[0] and "\"Literal['orderd']\"" in faults[0]


@pytest.mark.long
def test_pyright_is_strict_with_them(modules: Path) -> None:
    pytest.importorskip("pyright", reason="pyright is not installed: `make install` has it")
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (modules / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(modules)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=modules, check=False)
    if not re.search(r"^\d+ errors?, ", done.stdout, re.MULTILINE):
        pytest.skip(f"pyright's own program cannot be had here: {(done.stdout + done.stderr)[-300:]}")
    assert done.returncode == 0, done.stdout
