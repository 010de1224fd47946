"""Nothing that users meet is undocumented: error codes, metrics, routes, commands, flags, variables, public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from notify.admin_api.writes import WRITES
from notify.server.app import App
from notify.server.data.routes import DataRoutes
from notify.server.settings import Settings, environment_name
from notify.storage.memory import MemoryStore
from tests.support import command_page, error_codes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference.md").read_text()


def documented_codes() -> dict[str, str]:
    """The rows of docs/errors.md by their codes."""
    rows = re.findall(r"^\| `(\w+)` (\|.*\|)$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    codes = [code for code, _ in rows]
    assert len(codes) == len(set(codes)), "a code has two rows"
    return dict(rows)


def test_every_error_code_is_documented_once() -> None:
    made, unknown = error_codes.codes()
    documented = documented_codes().keys()
    assert unknown == set(), "say in tests/support/error_codes.py what these expressions may be"
    assert made - documented == set(), "add rows to docs/errors.md: why it arises, what to do"
    assert documented - made == set(), "docs/errors.md has codes that nothing raises"


def test_a_code_says_its_status_why_and_what_to_do() -> None:
    rows = {code: [cell.strip() for cell in row.strip("|").split("|")] for code, row in documented_codes().items()}
    assert [code for code, cells in rows.items() if len(cells) != 3 or not all(cells)] == []
    wrong = {code: status for code, status in error_codes.classes().items() if str(status) not in rows[code][0]}
    assert wrong == {}


def test_codes_are_found_wherever_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(
        'HERE = "by_name"\nclass Own(Conflict):\n    code = "by_class"\n'
        'Own("x", "by_own"); NotFound("x", HERE); Item(1, code="by_keyword"); Gone("x", "other")\n'
        'Conflict("x", "left" if x else "right"); error_of(1, f"http_{x}"); {"code": "by_dict"}\n'
        'Conflict("x", said())\n'
    )
    monkeypatch.setattr(error_codes, "product", lambda: [tmp_path / "made.py"])
    known, unknown = error_codes.codes()
    assert known == {"by_class", "by_own", "by_name", "by_keyword", "left", "right", "http_NNN", "by_dict"}
    assert unknown == {"said()"}


def metrics() -> set[str]:
    """The names of the metrics, as their modules write them."""
    names = set()
    for folder in ("notify", "spark"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "prometheus_client" in text or "Exposition" in text:
                names |= set(re.findall(r'"(notify_[a-z_]+)"', text))
    return names


def test_every_metric_is_documented() -> None:
    names = metrics()
    assert {"notify_alarms", "notify_bridge_lag_seconds", "notify_audit_windows"} <= names and len(names) > 30
    pages = REFERENCE + (DOCS / "audit.md").read_text()
    assert [name for name in sorted(names) if not re.search(rf"`{name}(_total)?[`{{]", pages)] == []


def test_every_route_is_documented() -> None:
    """Data routes and those of FastAPI, the console's pages too. (The admin routes' table is made from the code.)"""
    app = App(Settings(), MemoryStore)
    paths = {f"{method} {path}" for method, path, _ in DataRoutes.ROUTES}
    paths |= {str(getattr(route, "path", "")) for route in app.fastapi.routes} - {""}
    missing = []
    for path in sorted(paths):
        if "/v1/admin/" not in path:
            pattern = re.sub(r"\\\{\w+\\\}", r"\\{\\w+\\}", re.escape(path))
            if not re.search(rf"`{pattern}[`?]", REFERENCE):
                missing.append(path)
    assert missing == [], "add them to docs/reference.md"


def test_every_declared_write_has_its_route() -> None:
    """Forms and commands take the path from the declaration, and the server has it in the route."""
    paths = App(Settings(), MemoryStore).fastapi.openapi()["paths"]
    routes = [
        (method.upper(), re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))) for path in paths for method in paths[path]
    ]
    for write in WRITES.values():
        path = f"/v1/admin/{write.path}"
        assert any(method == write.method and re.fullmatch(route, path) for method, route in routes), write.name


def test_what_is_generated_is_current() -> None:
    """Commands and flags, settings, admin routes, counters, findings, and the rights that Kafka's ACLs must give."""
    pytest.importorskip("confluent_kafka")
    pytest.importorskip("pyspark")
    from tests.support import generated_docs

    assert [path.name for path, text in generated_docs.pages().items() if path.read_text() != text] == [], (
        "run `make reference`"
    )


def test_every_flag_says_what_it_is_for() -> None:
    commands = [(name, p) for name, command in command_page.commands() for p in command.params]
    assert [(name, p.name) for name, p in commands if p.param_type_name == "option" and not p.help] == []


def test_commands_in_blocks_are_whole() -> None:
    """A line that a reader copies runs: no flag that `notify` asks for is left out, none is made up."""
    lines = set(command_page.in_blocks())
    assert len(lines) > 60
    wrong = {line: f"{page}: {why}" for page, line in sorted(lines) if (why := command_page.fault(line))}
    assert wrong == {}


def test_commands_in_sentences_exist() -> None:
    """Each command that an alarm, an error or a page tells a reader to run is there."""
    said = set(command_page.in_sentences())
    assert len(said) > 150 and any(name.endswith("alarm.py") for name, _ in said)
    wrong = {line: f"{name}: {why}" for name, line in sorted(said) if (why := command_page.fault_of_part(line))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [("notify topic make", "no command make"), ("notify topic list --all", "--all"), ("notify relay", "")],
)
def test_what_is_wrong_with_a_command_in_a_sentence_is_said(line: str, why: str) -> None:
    assert why in command_page.fault_of_part(line) and bool(why) == bool(command_page.fault_of_part(line))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("notify topic create x", "--reason is missing"),
        ("notify topic create --reason y", "NAME"),
        ("notify topic create x --reason y --speed 3", "--speed"),
        ("notify topic make x", "no command make"),
        ("notify topic list orders", "too much"),
        ("notify topic create x --reason …", ""),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: str, why: str) -> None:
    assert why.lower() in command_page.fault(line).lower() and bool(why) == bool(command_page.fault(line))


HIDDEN = {"NOTIFY_CRASH_AT", "NOTIFY_KAFKA_LIB", "NOTIFY_TEST_SUITE"}
"""Variables of Notify's own tests."""


def test_every_environment_variable_is_documented() -> None:
    names: set[str] = set()
    for folder in ("notify", "storage", "spark"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= set(re.findall(r'"(NOTIFY_[A-Z_]+)"', path.read_text()))
    settings = {environment_name(name) for name in Settings.__dataclass_fields__}
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [name for name in sorted(names - settings - HIDDEN) if f"`{name}`" not in pages] == []


PUBLIC = ("client", "client/django", "check", "testing")
"""Packages whose names users import."""


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_in_the_reference_of_the_api(package: str) -> None:
    tree = ast.parse((ROOT / "notify" / package / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and "__all__" in ast.unparse(n)
    ]
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(rf"^::: notify\.{package.replace('/', '.')}\.(\w+)$", pages, re.MULTILINE))
    assert [name for name in names if name not in shown] == []


REMOVAL = re.compile(r"removed in \d+\.\d+")


def undated(text: str) -> list[str]:
    """The texts of deprecations that do not name the version which removes the thing."""
    if "deprecated" not in text.lower():  # the expression below takes 10 ms for each file
        return []
    return [
        " ".join(said.split())
        for said in re.findall(r"(?i)[^\n]*\bdeprecated\b(?:[^\n]*\n){0,2}", text)
        if not REMOVAL.search(said)
    ]


def test_each_deprecation_names_the_version_that_removes_it() -> None:
    assert undated('warn("x is deprecated", DeprecationWarning)\n') and not undated("x is deprecated: removed in 2.0\n")
    late = [
        f"{path.relative_to(ROOT)}: {said}"
        for folder in ("notify", "storage", "spark")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for said in undated(path.read_text())
    ]
    assert late == []
