"""Nothing that users meet is undocumented: error codes, metrics, routes, commands, flags, variables, public names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from notify import errors
from notify.admin_api.writes import WRITES
from notify.server.app import App
from notify.server.data.routes import DataRoutes
from notify.server.management import Management
from notify.server.settings import Settings, environment_name
from notify.storage.memory import MemoryStore
from tests.support import command_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference.md").read_text()

OUTSIDE = ("notify/cli/bench/", "notify/cli/demo_shop/", "notify/testing/", "notify/storage/", "notify/spark/")
"""Helpers of tests, and the links to the two folders that are read at the top level."""
POSITION = 1
"""`code` is the second argument of every error, and of `error_of`."""
MAKERS = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"error_of", "stale_epoch"}
MADE_OF_THEM = re.compile(rf"^class (\w+)\((?:\w+, )*(?:{'|'.join(MAKERS)})\b", re.MULTILINE)
CONSTANT = re.compile(r'^(\w+) = "([^"\\]*)"$', re.MULTILINE)
PASSED_ON = re.compile(r"(\w+\.)?code(\[:64\])?|row\['code'\]|codes\.get\(.*")
"""Expressions that give on a code which was found where it was made."""


def product() -> Iterator[Path]:
    """The files whose errors users meet."""
    for folder in ("notify", "storage", "spark"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not str(path.relative_to(ROOT)).startswith(OUTSIDE):
                yield path


def classes() -> dict[str, int]:
    """The status of each code that a class of notify.errors has."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.NotifyError)]
    return {kind.code: kind.status for kind in kinds}


def codes(paths: Iterable[Path]) -> tuple[set[str], set[str]]:
    """All codes that these files give: what a class, a call or an item has as its `code`. Then the expressions whose
    codes cannot be read from the source."""
    texts = [path.read_text() for path in paths]
    names = {*MAKERS, *(name for text in texts for name in MADE_OF_THEM.findall(text))}
    gives = re.compile(rf"\bcodes?\b|\b(?:{'|'.join(names)})\b *\(")  # to parse all files takes seconds
    trees = [ast.parse(text) for text in texts if gives.search(text) or MADE_OF_THEM.search(text)]
    makers = MAKERS | {
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base) for base in node.bases} & MAKERS
        and "__init__" not in {getattr(statement, "name", "") for statement in node.body}
    }
    everywhere = dict(found for text in texts for found in CONSTANT.findall(text))
    known: set[str] = set()
    unknown: set[str] = set()
    for tree in trees:
        nodes = list(ast.walk(tree))
        known_here = {name: everywhere[name] for name in imported(nodes) & everywhere.keys()} | constants(tree)
        for expression in codes_given(nodes, makers - {"stale_epoch"}):
            for value in values_of(expression):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    known.add(value.value)
                elif isinstance(value, ast.Name) and value.id in known_here:
                    known.add(known_here[value.id])
                elif isinstance(value, ast.JoinedStr):
                    known.add(re.sub(r"\{.*\}", "NNN", ast.unparse(value).strip("f'\"")))
                elif not isinstance(value, ast.Constant) and not PASSED_ON.fullmatch(ast.unparse(value)):
                    unknown.add(ast.unparse(value))
    return known, unknown


def constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module's names stand for."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    return {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def codes_given(nodes: Iterable[ast.AST], makers: set[str]) -> Iterator[ast.expr]:
    """The expressions that a module gives as codes."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "code" and name != "Exit")
            if name in makers and isinstance(node.func, ast.Name) and len(node.args) > POSITION:
                yield node.args[POSITION]
        elif isinstance(node, ast.ClassDef):
            yield from class_codes(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if any(isinstance(target, ast.Name) and target.id == "codes" for target in node.targets):
                yield from node.value.values
        elif isinstance(node, ast.Dict):
            yield from (
                value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "code"
            )


def class_codes(node: ast.ClassDef) -> Iterator[ast.expr]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and any(getattr(to, "id", "") == "code" for to in statement.targets):
            yield statement.value


def values_of(expression: ast.expr) -> Iterable[ast.expr]:
    """The values that an expression may have."""
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.BoolOp):
        return expression.values
    return [expression]


def documented_codes() -> dict[str, str]:
    """The rows of docs/errors.md by their codes."""
    rows = re.findall(r"^\| `(\w+)` (\|.*\|)$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    codes = [code for code, _ in rows]
    assert len(codes) == len(set(codes)), "a code has two rows"
    return dict(rows)


def test_every_error_code_is_documented_once() -> None:
    made, unknown = codes(product())
    documented = documented_codes().keys()
    assert unknown == set(), "say in PASSED_ON what these expressions may be"
    assert made - documented == set(), "add rows to docs/errors.md: why it arises, what to do"
    assert documented - made == set(), "docs/errors.md has codes that nothing raises"


def test_a_code_says_its_status_why_and_what_to_do() -> None:
    rows = {code: [cell.strip() for cell in row.strip("|").split("|")] for code, row in documented_codes().items()}
    assert [code for code, cells in rows.items() if len(cells) != 3 or not all(cells)] == []
    wrong = {code: status for code, status in classes().items() if str(status) not in rows[code][0]}
    assert wrong == {}


def test_codes_are_found_wherever_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        'HERE = "by_name"\nclass Own(Conflict):\n    code = "by_class"\n'
        'Own("x", "by_own"); NotFound("x", HERE); Item(1, code="by_keyword"); Gone("x", "other")\n'
        'Conflict("x", "left" if x else "right"); error_of(1, f"http_{x}"); {"code": "by_dict"}\n'
        'Conflict("x", said())\n'
    )
    known, unknown = codes([tmp_path / "made.py"])
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
    pages = REFERENCE + (DOCS / "audit-watch.md").read_text()
    assert [name for name in sorted(names) if not re.search(rf"`{name}(_total)?[`{{]", pages)] == []


def test_every_route_is_documented() -> None:
    """Data routes and those of FastAPI, the console's pages too. (The admin routes' table is made from the code.)"""
    management = Management(App(Settings(), MemoryStore))
    paths = {f"{method} {path}" for method, path, _ in DataRoutes.ROUTES}
    paths |= {str(getattr(route, "path", "")) for route in management.fastapi.routes} - {""}
    missing = []
    for path in sorted(paths):
        if "/v1/admin/" not in path:
            pattern = re.sub(r"\\\{\w+\\\}", r"\\{\\w+\\}", re.escape(path))
            if not re.search(rf"`{pattern}[`?]", REFERENCE):
                missing.append(path)
    assert missing == [], "add them to docs/reference.md"


def test_every_declared_write_has_its_route() -> None:
    """Forms and commands take the path from the declaration, and the server has it in the route."""
    paths = Management(App(Settings(), MemoryStore)).fastapi.openapi()["paths"]
    routes = [
        (method.upper(), re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))) for path in paths for method in paths[path]
    ]
    for write in WRITES.values():
        path = f"/v1/admin/{write.path}"
        assert any(method == write.method and re.fullmatch(route, path) for method, route in routes), write.name


def test_generated_pages_are_current() -> None:
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


def test_help_writes_arguments_as_the_page_does() -> None:
    """typer wrote {GROUP} {id}: in capitals only what had a name of its own."""
    arguments = [p for _, command in command_page.commands() for p in command.params if p.param_type_name == "argument"]
    assert arguments and all(p.metavar == p.metavar.upper() and p.metavar.isalpha() for p in arguments)


def test_help_has_no_line_that_breaks_off() -> None:
    """typer keeps the line breaks of a docstring after its first paragraph, and a terminal broke such lines twice."""
    texts = {name: inspect.cleandoc(command.help).split("\n\n")[1:] for name, command in command_page.commands()}
    assert [name for name, paragraphs in texts.items() if any("\n" in each for each in paragraphs)] == []


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
def test_a_wrong_command_in_a_sentence_is_found(line: str, why: str) -> None:
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
def test_a_wrong_command_line_is_found(line: str, why: str) -> None:
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
