"""`make release` refuses what is not green, and says why; its own steps are looked at here, without a build."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.release import __main__ as release
from tests.release import extras, licences

ROOT = Path(__file__).parents[2]


def outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *steps: release.Step
) -> tuple[int, str]:
    """The exit code and the last line of a release of these steps."""
    monkeypatch.setattr(release, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["release"])
    code = release.main()
    return code, capsys.readouterr().out.strip().splitlines()[-1]


def good() -> str:
    return "well"


def bad() -> str:
    raise release.Refused("it is red")


def away() -> str:
    raise release.LeftOut("no network")


def test_a_release_needs_green_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    well, red, gone = release.Step("a", good), release.Step("b", bad), release.Step("c", away)
    assert outcome(monkeypatch, capsys, well)[1].startswith("VERDICT: PASS")
    assert outcome(monkeypatch, capsys, red, well) == (1, "VERDICT: FAIL b: it is red")
    assert outcome(monkeypatch, capsys, gone, well) == (2, "VERDICT: INCOMPLETE without c (no network)")


def test_a_changed_tree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "run", lambda words: " M notify/errors.py\n" if "status" in words else "abc")
    with pytest.raises(release.Refused, match="not clean"):
        release.tree()


def test_an_audit_that_knows_nothing_is_no_audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip-audit ends with 0 where its service knows none of the packages."""
    (tmp_path / "sdk" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    said = "No known vulnerabilities found\nsqlalchemy  Dependency not found and could not be audited: sqlalchemy (2)\n"
    monkeypatch.setattr(release, "WORK", tmp_path)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    with pytest.raises(release.LeftOut, match="does not know 1 packages: sqlalchemy"):
        release.audited()


def test_nothing_uploads() -> None:
    """The word stands in what is printed only: no step runs it."""
    source = (ROOT / "tests" / "release" / "__main__.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    words = [ast.unparse(call) for call in calls if ast.unparse(call.func) in ("run", "subprocess.run")]
    assert words and not [word for word in words if "upload" in word]


def test_each_extra_is_used() -> None:
    assert set(extras.USES) == {"", *extras.names(ROOT / "pyproject.toml")}
    missing = []
    for code in (*extras.USES.values(), extras.SERVES):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("notify"):
                missing += [f"{node.module}.{it.name}" for it in node.names if not _is_there(node.module, it.name)]
            elif isinstance(node, ast.Import):
                missing += [it.name for it in node.names if it.name.startswith("notify") and not find_spec(it.name)]
    assert missing == [], "make release stopped after half an hour: a module had moved"


def _is_there(module: str | None, name: str) -> bool:
    """Whether a module has a name, or a module of that name."""
    assert module is not None
    return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Apache-2.0", True),
        ("MIT License", True),
        ("BSD-3-Clause AND PSF-2.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("GNU Lesser General Public License v3 (LGPLv3)", True),
        ("GPL-3.0-or-later", False),
        ("GNU Affero General Public License v3", False),
        ("GNU General Public License v2 (GPLv2)", False),
        ("", False),
    ],
)
def test_licences(text: str, allowed: bool) -> None:
    assert licences.is_allowed(text) is allowed


def test_licences_of_what_is_installed_here() -> None:
    known = licences.of([Path(pytest.__file__).parents[1]])
    assert len(known) > 50 and not [name for name, text in known.items() if name.startswith("SQLAlchemy ") and not text]


def test_every_pin_runs_on_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2: there `make install` refuses a pin that asks for a later patch release."""
    pins = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = [it for it in distributions() if f"{it.name}=={it.version}".lower() in pins]
    wanted = {it.name: it.metadata["Requires-Python"] for it in pinned}
    assert {name: spec for name, spec in wanted.items() if spec and "3.11.0" not in SpecifierSet(spec)} == {}
    assert len(wanted) > 100, "the names of the pins are not those of the distributions"
