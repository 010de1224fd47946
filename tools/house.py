"""Figures of the tree, to compare commits: `python -m tools.house [REVISION …]`, by default of the working tree.

Lines and files of product, wheel, tools and tests; the rooms at the top of `notify/`; modules that only one other
module of their folder imports; the files that name a field of a subscription; and the product's files on five walks.
The first three walks (a message sent and committed, delivered, settled) are traced in one process. The last two are
what the bridge and the audit import of their own rooms. All but the traced walks only parse the files of a revision;
those import it, with the packages that are installed now.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PRODUCT = ("notify", "storage", "spark")
"""The folders of the product; a wheel has the last two as notify/storage and notify/spark."""
TEXTS = (".css", ".html", ".java", ".js", ".json", ".mako", ".md", ".toml")
FIELDS = ("max_attempts", "retry_min", "retry_max")
"""Fields of a subscription whose names mean nothing else."""
SMALL_LINES = 100
OUTCOMES, SETTLE = "/v1/transactions/outcomes", "/v1/groups/house/settle"
WALK_SECONDS = 30.0
BRIDGE, AUDIT = "notify/binlog_bridge/bridge.py", "spark/audit.py"


# --- what the files say ---------------------------------------------------------------------------------------------


def files_in(root: Path, *folders: str, endings: tuple[str, ...] = (".py",)) -> list[Path]:
    """The files below some folders, without those behind links."""
    return sorted(
        Path(directory) / name
        for folder in folders
        for directory, _, names in os.walk(root / folder)
        for name in names
        if name.endswith(endings) and "__pycache__" not in directory and "java_build" not in directory
    )


def lines_of(files: Iterable[Path]) -> int:
    return sum(file.read_text(errors="replace").count("\n") for file in files)


def module_of(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("notify", *parts) if parts[0] in PRODUCT[1:] else parts)


def imports_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """By module the modules of the product that it imports anywhere, also within a function."""
    imports: dict[str, set[str]] = {}
    for module, file in modules.items():
        found = imports[module] = set[str]()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names if alias.name in modules)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.update([whole] if whole in modules else [node.module] if node.module in modules else [])
    return imports


def paragraphs(modules: Mapping[str, Path], imports: Mapping[str, set[str]]) -> list[str]:
    """The small modules that only one other module of their folder imports."""
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for module, imported in imports.items():
        for each in imported:
            importers[each].add(module)
    return [
        module
        for module, file in modules.items()
        if file.name != "__init__.py"
        and len(importers[module]) == 1
        and module.rpartition(".")[0] == next(iter(importers[module])).rpartition(".")[0]
        and lines_of([file]) <= SMALL_LINES
    ]


def reached(imports: Mapping[str, set[str]], start: str, within: tuple[str, ...]) -> set[str]:
    """The modules of some rooms that a module imports, directly or by others of these rooms."""
    found, unseen = {start}, [start]
    while unseen:
        news = {each for each in imports[unseen.pop()] if each.startswith(within)} - found
        found |= news
        unseen += news
    return found


def figures(root: Path) -> dict[str, Any]:
    """The figures of one tree."""
    product = files_in(root, *PRODUCT)
    texts = files_in(root, *PRODUCT, endings=TEXTS)
    tests, tools = files_in(root, "tests"), files_in(root, "tools")
    modules = {module_of(root, file): file for file in product}
    imports = imports_of(modules)
    rooms = sorted(
        entry.name
        for entry in (root / "notify").iterdir()
        if (entry.is_dir() or entry.suffix == ".py") and not entry.name.startswith("_")
    )
    naming = {
        field: [str(f.relative_to(root)) for f in [*product, *texts] if field in f.read_text(errors="replace")]
        for field in FIELDS
    }
    alone = paragraphs(modules, imports)
    bridge, audit = module_of(root, root / BRIDGE), module_of(root, root / AUDIT)
    return {
        "product": {"lines": lines_of(product), "files": len(product)},
        "wheel": {"lines": lines_of([*product, *texts]), "files": len(product) + len(texts)},
        "tools": {"lines": lines_of(tools), "files": len(tools)},
        "tests": {"lines": lines_of(tests), "files": len(tests)},
        "rooms": {"count": len(rooms), "names": rooms},
        "one_importer": {"count": len(alone), "lines": lines_of(modules[m] for m in alone), "names": alone},
        "field": {field: {"count": len(files), "files": files} for field, files in naming.items()},
        "walks": {
            "4 bridge": {"files": len(reached(imports, bridge, (bridge.rpartition(".")[0], "notify.movers.sinks")))},
            "5 audit": {"files": len(reached(imports, audit, ("notify.spark.",)))},
        },
    }


# --- what runs ------------------------------------------------------------------------------------------------------


class Trace:
    """Which files of the product the calls of each thread enter, in order: files, changes of file, and returns."""

    def __init__(self, root: Path) -> None:
        self._roots = tuple(f"{(root / folder).resolve()}{os.sep}" for folder in PRODUCT)
        self._names: dict[CodeType, str] = {}
        self.entered: dict[int, list[str]] = collections.defaultdict(list)
        """By thread, the file of each call."""
        self._counts = False

    def _file(self, code: CodeType) -> str:
        name = self._names.get(code)
        if name is None:
            path = os.path.realpath(code.co_filename)
            is_testing = f"{os.sep}testing{os.sep}" in path
            name = self._names[code] = path if path.startswith(self._roots) and not is_testing else ""
        return name

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._counts and event == "call" and (name := self._file(frame.f_code)):
            self.entered[threading.get_ident()].append(name)

    @contextlib.contextmanager
    def of_all_threads(self) -> Iterator[None]:
        """Watch this thread, and those that start within the context; `begin` says from when on it counts."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        self.entered.clear()
        self._counts = True

    def end(self) -> dict[str, int]:
        """Stop counting; the figures since `begin`."""
        self._counts = False
        return self.figures()

    def figures(self) -> dict[str, int]:
        changes = returns = 0
        for names in list(self.entered.values()):
            seen: set[str] = set()
            before = ""
            for name in names:
                if name != before:
                    changes += 1
                    returns += name in seen
                seen.add(name)
                before = name
        return {
            "calls": sum(map(len, self.entered.values())),
            "files": len({name for names in self.entered.values() for name in names}),
            "changes": changes,
            "returns": returns,
        }


def traced(root: Path) -> dict[str, dict[str, int]]:
    """One message from `send` to the recorded outcome, and another from `send` through a handler to its settlement.

    Client and server are in this process, the server's storage in memory.
    """
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables, use_explicit_begin
    from notify.testing import InMemoryServer

    walks = {}
    trace = Trace(root)
    with trace.of_all_threads(), tempfile.TemporaryDirectory() as directory, InMemoryServer() as server:
        engine = sa.create_engine(f"sqlite:///{directory}/shop.db")
        use_explicit_begin(engine)
        create_tables(engine)
        producer = TransactionProducer(server.url, group="house", engine=engine, answer_checks=False)
        consumer = Consumer(server.url, group="house", inbox=Inbox(engine))

        @consumer.subscribe("house.built", start="earliest")
        def on_built(message: object, session: object) -> None:
            pass

        def send() -> None:
            with answered(server, OUTCOMES), Session(engine) as session, session.begin():
                producer.send(session, Message("house.built", {"storeys": 2}))

        send()  # what happens once: connections, statements, patterns
        trace.begin()
        send()
        walks["1 send to outcome"] = trace.end()
        with answered(server, SETTLE):
            running = threading.Thread(target=consumer.run, daemon=True)
            running.start()
        trace.begin()
        with answered(server, SETTLE):
            send()
        walks["1 to 3 send to settlement"] = trace.end()
        consumer.stop()
        running.join(30)
        producer.close()
    return walks


@contextlib.contextmanager
def answered(server: Any, path: str) -> Iterator[None]:
    """Wait at the end of the block until the server has answered a request to a route, which begins within it."""
    before = server.answered(path)
    yield
    deadline = time.monotonic() + WALK_SECONDS
    while server.answered(path) == before:
        if time.monotonic() > deadline:
            raise SystemExit(f"no request to {path} was answered within {WALK_SECONDS:g} s")
        time.sleep(0.01)


# --- the command ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tree(revision: str) -> Iterator[Path]:
    """The files of a revision in a directory; "" for those of the working tree."""
    here = Path(__file__).parents[1]
    if not revision:
        yield here
        return
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.Popen(["git", "archive", revision], cwd=here, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=archive.stdout, mode="r|") as files:
            files.extractall(directory, filter="tar")
        if archive.wait():
            raise SystemExit(f"git has no revision {revision}")
        yield Path(directory)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--traced"]:
        print(json.dumps(traced(Path(arguments[1]))))
        return
    for revision in arguments or [""]:
        with tree(revision) as root:
            found = figures(root)
            command = [sys.executable, str(Path(__file__)), "--traced", str(root)]
            run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
            found["walks"] |= (
                json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"1 to 3": run.stderr[-500:]}
            )
        print(json.dumps({"revision": revision or "working tree"} | found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
