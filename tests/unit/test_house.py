"""Rules of the tests and of all texts: shared helpers lie in tests/support, a pause has a reason, files are short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.workers import IN_ORDER, TOGETHER

ROOT = Path(__file__).parents[2]
PAUSES = ("sleep",)
"""Names of functions that pause, in any module: `time.sleep`, `asyncio.sleep`."""


def modules() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The full names that a module of `package` imports; for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


NAMES_A_TEST = re.compile(r"^\s*(?:import|from)\s[^\n(]*(?:\([^)]*)?\b(?:test_|conftest\b)", re.MULTILINE)
"""An import in a test: its line, or its lines in parentheses."""


def is_test(module: str) -> bool:
    """Whether a full name is a test module's or a conftest's."""
    parts = module.split(".")
    return parts[0] == "tests" and any(part.startswith("test_") or part == "conftest" for part in parts[1:])


def pauses_without_reason(source: str) -> list[int]:
    """The lines of calls of `sleep` that have no comment, neither on a line of the call nor on the line above."""
    if not any(name in source for name in PAUSES):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in PAUSES
        and commented.isdisjoint(range(node.lineno - 1, (node.end_lineno or node.lineno) + 1))
    ]


def test_nothing_is_imported_from_a_test() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in modules()
        if NAMES_A_TEST.search(text := path.read_text())  # to parse all files takes seconds
        for module in imported(ast.parse(text), name_of(path.parent))
        if is_test(module)
    ]
    assert wrong == [], "move what is shared to tests/support, or to a module of the folder that is no test"


def test_every_pause_has_a_reason() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in pauses_without_reason(path.read_text())
    ]
    assert wrong == [], "wait for an event (tests/support/clock.py), or say in a comment what the pause is for"


@pytest.mark.parametrize(
    "line",
    [
        "import tests.unit.test_house",
        "from tests.unit import test_house",
        "from tests.unit.test_house import modules",
        "from tests.unit import (\n    test_house,\n)",
        "from tests.conftest import OrSkip",
        "from ..unit.test_house import modules",
        "from . import conftest",
    ],
)
def test_an_import_from_a_test_is_seen(line: str) -> None:
    assert NAMES_A_TEST.search(f"import os\n{line}\n")
    assert any(map(is_test, imported(ast.parse(line), "tests.unit")))


def test_the_order_of_work_names_files_that_there_are() -> None:
    """Files of Kafka had new names, and each of their workers started a node of its own."""
    files = [str(path.relative_to(ROOT)) for path in modules()]
    named = {*IN_ORDER, *(beginning for several in TOGETHER.values() for beginning in several)}
    assert [beginning for beginning in sorted(named) if not any(file.startswith(beginning) for file in files)] == []


def test_an_import_from_elsewhere_is_none() -> None:
    lines = "import pytest\nfrom tests.support import clock\nfrom notify.testing import forked\nfrom . import writers"
    assert not any(map(is_test, imported(ast.parse(lines), "tests.unit")))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("time.sleep(1)", [1]),
        ("x = 1\nawait_it(asyncio.sleep(1))", [2]),
        ("sleep(1)", [1]),
        ("time.sleep(1)  # the pause between two looks", []),
        ("# the pause between two looks\ntime.sleep(1)", []),
        ("time.sleep(\n    1,  # the pause between two looks\n)", []),
        ("# of something else\nx = 1\ntime.sleep(1)", [3]),
        ("text = 'time.sleep(1)'", []),
    ],
)
def test_a_pause_without_a_reason_is_seen(source: str, lines: list[int]) -> None:
    assert pauses_without_reason(source) == lines


def unused_arguments(source: str) -> list[str]:
    """The arguments of a module's functions that their bodies never read, but for `self` and `_`."""
    unused = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            read = {n.id for part in function.body for n in ast.walk(part) if isinstance(n, ast.Name)}
            given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            unused += [f"{function.name}: {a.arg}" for a in given if a.arg not in {"self", "_", *read}]
    return unused


def test_a_command_reads_each_of_its_options() -> None:
    """`notify dead-letter redrive --force` sent nothing about it to the server, which went on refusing."""
    modules = sorted((ROOT / "notify/cli").glob("*.py"))
    unused = {path.name: names for path in modules if (names := unused_arguments(path.read_text()))}
    assert len(modules) > 20 and unused == {}


def test_an_argument_that_is_not_read_is_seen() -> None:
    assert unused_arguments("def f(self, a, b, _, *, c=b): return lambda: a") == ["f: b", "f: c"]


PRODUCT = ("notify", "storage", "spark")
FRAGMENT = re.compile(r'^\s*(?:"""|# )(?:Of|That|What) ', re.MULTILINE)
"""A text that begins so is no sentence, and does not name what it is about."""


def test_no_text_begins_with_a_fragment() -> None:
    paths = [path for folder in (*PRODUCT, "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 200
    fragments = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in paths
        for text in (path.read_text(),)
        for match in FRAGMENT.finditer(text)
    ]
    assert fragments == []


NOT_ENGLISH = re.compile(
    r"\banew\b|\b[Ww]hoever\b|\b(?:goes|go|went|going) on\b|\bhea(?:rs?|rd) of\b|\b[Bb]eside\b"
    r"|\bst(?:ands?|ood) still\b|\b(?:is|are|was|were|be) away\b(?! from)"
    r"|(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|other\b|such\b|[a-z]+er\b)[a-z]+"
)
"""German in English words. In its place: again, callers, continues, learns of, next to, is stuck, is unreachable, is
not a."""


def test_the_product_speaks_english() -> None:
    paths = [path for folder in PRODUCT for kind in ("*.py", "*.html") for path in (ROOT / folder).rglob(kind)]
    assert len(paths) > 200
    odd = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NOT_ENGLISH.search(line)
    ]
    assert odd == []


READ_A_CLOCK = {
    "it waits until something comes, and then says that it did not come": (
        "binlog_bridge.postgresql.replication binlog_bridge.purge cli.storage client.kafka.control client.kafka.feed "
        "client.kafka.membership "
        "client.kafka.modes client.kafka.ownership client.kafka.starting client.kafka.transactions "
        "client.django.configured client.producer.outgoing kafka.brokers kafka.stored_bodies kafka.table "
        "kafka.diagnosis "
        "kafka.transactional runtime.addresses runtime.maven "
        "movers.relay.leases server.groups.kafka.brokers server.groups.kafka.compacted server.groups.kafka.letters "
        "server.workers.supervisor spark.inputs.kafka_positions "
        "spark.inputs.kafka_source "
        "spark.messages.server spark.messages.shipped object_store.store storage.sql.writer"
    ),
    "it works again and again beside others, and leaves them their share": (
        "binlog_bridge.postgresql.stream binlog_bridge.bridge binlog_bridge.listed "
        "client.kafka.loop client.kafka.settling "
        "movers.relay.relay server.cluster.membership server.configuration.follow "
        "server.delivery.group "
        "server.watch.chart_file server.watch.figures server.watch.history "
        "movers.sinks.delays.release movers.sinks.showing spark.watch.alarms "
        "object_store.object_file storage.shipped.worker storage.sql.postgresql storage.sql.retention "
        "storage.sql.shards"
    ),
    "what it knows serves for a while; a test asks for what is new": (
        "kafka.topics server.access.oidc server.groups.kafka.latest_snapshot server.groups.kafka.thread server.webhooks"
    ),
    "it holds processes, connections and leases of a database, which live in real time": (
        "client.producer.blocking server.workers.acceptor server.workers.parent storage.sql.placing"
    ),
    "it measures how long something took, and tells it": (
        "client.bodies.reading client.bodies.sending client.handling.runs server.data.routes "
        "spark.audit storage.log.threads"
    ),
    "one look sees a part, the next one goes on; a test looks until it has seen all": (
        "server.groups.kafka.letter_counts server.groups.kafka.oldest"
    ),
}
"""The modules of the product that read a clock themselves, by the reason why a test does not depend on it. All others,
above all those whose answers end after a while, take a clock as an argument, which a test drives."""

CLOCKS = {"monotonic", "perf_counter", "thread_time", "monotonic_ns", "perf_counter_ns"}


def reads_a_clock(source: str) -> bool:
    """Whether a module calls a clock of `time`; one that only names it, as the default of an argument, does not."""
    return any(clock in source for clock in CLOCKS) and any(
        isinstance(node, ast.Call)
        and (isinstance(node.func, ast.Name) or ast.unparse(node.func).startswith("time."))
        and ast.unparse(node.func).removeprefix("time.") in CLOCKS
        for node in ast.walk(ast.parse(source))
    )


def test_modules_with_time_limits_take_their_clock_as_an_argument() -> None:
    """A list of 10,000 letters met the bound of a search on a slow machine, and a test of it was red."""
    product = [path for folder in ("notify", "storage", "spark") for path in (ROOT / folder).rglob("*.py")]
    reading = {name_of(path).removeprefix("notify.") for path in product if reads_a_clock(path.read_text())}
    reading = {name for name in reading if not name.startswith(("cli.bench.", "cli.demo_shop.", "testing."))}
    allowed = {module for modules in READ_A_CLOCK.values() for module in modules.split()}
    assert reading - allowed == set(), "take `monotonic: Callable[[], float] = time.monotonic` as an argument"
    assert allowed - reading == set(), "these read no clock any more"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import time\nnow = time.monotonic()", True),
        ("from time import perf_counter\nnow = perf_counter()", True),
        ("def f(monotonic=time.monotonic): pass", False),
        ("now = self._monotonic()", False),
        ("now = self.monotonic()", False),
        ("now = loop.time()", False),
    ],
)
def test_a_clock_that_is_read_is_seen(source: str, reads: bool) -> None:
    assert reads_a_clock(source) is reads


GUESSES = ("isdigit", "isdecimal", "isnumeric")
"""Methods of texts that `int` does not agree with: it refuses ², and takes ٣."""
OF_COLUMNS = ("spark/judge/measures.py",)
"""Names that we make ourselves."""


def guesses(source: str) -> list[int]:
    """The lines of calls of GUESSES."""
    if not any(name in source for name in GUESSES):
        return []
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [node.lineno for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in GUESSES]


def test_a_number_from_outside_is_read_by_one_function() -> None:
    """`limits.digits`: each second reader took other texts for numbers, and some were answered with 500."""
    folders = [folder for folder in ("notify", "storage", "spark") if (ROOT / folder).is_dir()]
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
        if str(path.relative_to(ROOT)) not in OF_COLUMNS
        and not {"testing", "bench"} & set(path.relative_to(ROOT).parts)
        for line in guesses(path.read_text())
    }
    assert {place.partition(":")[0] for place in found} == {"notify/protocol/limits.py"} and len(found) == 1, found
    assert guesses("a = '²'.isdigit()\nb.isdecimal\nc.isnumeric()") == [1, 3]
