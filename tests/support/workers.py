"""The distribution of tests among workers (pytest-xdist), what workers share, and the end of all that a run started.

A worker takes whole files, one after the other, and each file goes to the next worker that is free. What is dear to
start (a Spark session, a Kafka node) is shared by files that go to one worker together; tests that only compute go one
by one.
"""

from __future__ import annotations

import gc
import zlib
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from notify.testing.guardian import Guardian
from tests.support.databases import ForWorkers

_KAFKA = "tests/integration/test_kafka_"
_GROUPS = ("admin_process", "doctor", "groups", "refused", "stopping", "subscriptions", "unexpected_records")
TOGETHER = {
    "Kafka's groups": (
        *(f"{_KAFKA}{noun}" for noun in _GROUPS),
        "tests/integration/test_queues_",
        "tests/contract/test_letters.py",
        "tests/history/test_history_over_kafka.py",
    ),
    "Kafka's sinks, consumers and delays": (
        _KAFKA,
        "tests/integration/test_layouts.py",
        "tests/integration/test_auto_everywhere.py",
        "tests/contract/test_sinks",
        "tests/contract/test_bridges.py",
        "tests/audit/test_kafka_input.py",
    ),
    "the audit": ("tests/audit/",),
}
"""Tests whose path begins with one of these share a worker; the first that fits counts. All tests of the audit have one
Spark session, since the first audit of a session takes 12 s of CPU more than the next ones; and all tests that need no
Kafka of their own have one of two nodes, since a node takes 5 s of CPU to start and to warm up, and 2 % of a processor
until its worker ends. No more than that goes together, since a worker's tests run one after the other."""

ONE_BY_ONE = ("tests/simulation/",)
"""Tests of these files go to whichever worker is free."""

_INTEGRATION = "tests/integration/test_"
IN_ORDER = (
    *TOGETHER["Kafka's groups"],
    *TOGETHER["Kafka's sinks, consumers and delays"],
    *TOGETHER["the audit"],
    "tests/browser/test_console.py",
    "tests/history/",
    f"{_INTEGRATION}relay_faults.py",
    "tests/crash/",
    f"{_INTEGRATION}snippets.py",
    "tests/unit/test_imports.py",
    "tests/browser/",
    f"{_INTEGRATION}bridge",
    *(f"{_INTEGRATION}{noun}.py" for noun in ("mysql_positions", "ended_suites", "doctor_databases")),
    f"{_INTEGRATION}inbox.py",
    "tests/unit/test_documented.py",
    *(f"{_INTEGRATION}{noun}.py" for noun in ("demo", "workers", "shipping", "key_map", "push", "garbage")),
    *(f"{_INTEGRATION}{noun}.py" for noun in ("testing", "commands", "restore", "sql_storage", "hanging_workers")),
    "tests/simulation/",
    "tests/unit/test_typed_pages.py",
)
"""The order in which work is given out. What takes long begins first, so that the workers end together; and what waits
for servers (Kafka, bridges, relays) runs beside what computes (Spark, Chromium, histories): workers that all wait
left half of the processors idle. The rest follows in the order of the folders, at its end the short unit tests."""

GUARDIAN = pytest.StashKey[Guardian]()
STARTED = pytest.StashKey[ForWorkers]()
_STARTED = "databases of the workers"


def pytest_configure(config: pytest.Config) -> None:
    """Guard the run; in the controller of several workers, start the databases while the workers collect."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    config.stash[GUARDIAN] = Guardian()
    if config.getoption("numprocesses", None):
        config.stash[STARTED] = ForWorkers()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller, for each worker: tell it where the databases are."""
    node.workerinput[_STARTED] = str(node.config.stash[STARTED].directory)


def databases_of(config: pytest.Config) -> Path | None:
    """Where a worker finds the databases that the controller started; None where there is one process only."""
    directory = getattr(config, "workerinput", {}).get(_STARTED)
    return None if directory is None else Path(directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The workers have ended: stop what they shared, and end what they left."""
    try:
        if STARTED in config.stash:
            config.stash[STARTED].stop()
    finally:
        if GUARDIAN in config.stash:
            config.stash[GUARDIAN].end()


@cache
def rank(file: str) -> int:
    """The place of a test's file in the order of work."""
    for place, beginning in enumerate(IN_ORDER):
        if file.startswith(beginning):
            return place
    return len(IN_ORDER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid.partition("::")[0]))
    leave_kinds_to_long(items)


ON_ONE_KIND = ("tests/integration/", "tests/contract/test_letters.py")
KINDS = ("sqlite", "postgresql", "mysql", "mariadb")


def leave_kinds_to_long(items: list[pytest.Item]) -> None:
    """Mark tests as `long`, so that in `make test` each test of the integration folder runs on one kind of database,
    and one of three of those that run on the queue server and on Kafka runs on Kafka.

    The checksum of its name says which, so that each subject meets each kind. What differs between kinds of databases
    has contract suites (tests/contract), which run on all.
    """
    cases: dict[tuple[str, str], list[tuple[str, pytest.Item]]] = defaultdict(list)
    for item in items:
        if item.nodeid.startswith(ON_ONE_KIND) and hasattr(item, "callspec"):
            assert isinstance(item, pytest.Function)
            kinds = {*KINDS, "Kafka"} & {value for value in item.callspec.params.values() if isinstance(value, str)}
            if len(kinds) == 1 and item.get_closest_marker("long") is None:
                cases[item.nodeid.partition("::")[0], item.originalname].append((kinds.pop(), item))
    for (_, name), of_test in cases.items():
        turn = zlib.crc32(name.encode())
        kinds_of_it = sorted({kind for kind, _ in of_test})
        for kind, item in of_test:
            is_left = turn % 3 > 0 if kind == "Kafka" else kind != kinds_of_it[turn % len(kinds_of_it)]
            if is_left:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without garbage collection: a look at half a million objects, which all stay, takes 0.3 s of CPU."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give out whole files, and what belongs together as one."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            for together, beginnings in TOGETHER.items():
                if nodeid.startswith(beginnings):
                    return together
            if nodeid.startswith(ONE_BY_ONE):
                return nodeid
            return nodeid.partition("::")[0]

    # By default what has the most tests goes first, however long they take.
    config.option.loadscopereorder = False
    return ByFile(config, log)
