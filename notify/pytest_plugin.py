"""The pytest fixture `notify_server`, an in-memory server for each test, and the mark `notify_crashes`, which runs a
test once for each step that it takes and kills it there. Every pytest run loads this small module."""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest

from notify.runtime.extras import remedy

if TYPE_CHECKING:
    from notify.testing.explorer import Process
    from notify.testing.server import InMemoryServer

MARK = "notify_crashes"
PROCESS = "notify_process"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(causes=, effects=, database=, kafka=, real=False, most_steps=200, seconds=): kill the test at each "
        f"step that it takes, see notify.testing.explore; it gets each of its processes as {PROCESS}. `database` and "
        "`kafka` may also be names of fixtures that give the URL.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse marked tests that are not called as the mark needs it. A plug-in for coroutines, or unittest, would call
    them once, and they would pass although nothing was explored."""
    if item.get_closest_marker(MARK) is None or not isinstance(item, pytest.Function):
        return
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        pytest.fail(
            f"the mark {MARK} is for pytest's tests, and this one is unittest's: call notify.testing.explore in it",
            pytrace=False,
        )
    if inspect.iscoroutinefunction(item.function):
        pytest.fail(
            f"a test with the mark {MARK} is a plain function, without async: {PROCESS}.act also takes coroutine "
            "functions",
            pytrace=False,
        )


@pytest.fixture
def notify_server() -> Iterator[InMemoryServer]:
    """An in-memory server. Needs the extra `server`."""
    try:
        from notify.testing.server import InMemoryServer
    except ImportError as error:
        _fail_without_server(error, "the fixture notify_server")

    with InMemoryServer() as server:
        yield server


@pytest.fixture(name=PROCESS)
def notify_process(request: pytest.FixtureRequest) -> None:
    """The process that a test with the mark `notify_crashes` is run in."""
    if request.node.get_closest_marker(MARK) is None:
        pytest.fail(f"{PROCESS} belongs to the mark: @pytest.mark.{MARK}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test once for each step that it takes."""
    marks = list(pyfuncitem.iter_markers(MARK))  # the closest first: of the test, its class, its module
    if not marks:
        return None
    if any(mark.args for mark in marks):
        pytest.fail(f"the options of the mark {MARK} have names, such as causes= and effects=", pytrace=False)
    try:
        from notify.testing.explorer import explore
    except ImportError as error:
        _fail_without_server(error, f"the mark {MARK}")

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def service(process: Process) -> object:
        return pyfuncitem.obj(**(arguments | ({PROCESS: process} if PROCESS in arguments else {})))

    options = {name: value for mark in reversed(marks) for name, value in mark.kwargs.items()}
    for name in ("database", "kafka"):
        if isinstance(options.get(name), str) and options[name].isidentifier():  # no URL is one
            options[name] = pyfuncitem._request.getfixturevalue(options[name])
    explored = explore(service, **options)
    if explored.findings:
        pytest.fail(str(explored), pytrace=False)
    if explored.missed:
        pyfuncitem.warn(pytest.PytestWarning(f"{explored}. Not tried, for example: {explored.missed[0]}"))
    return True


def _fail_without_server(error: ImportError, what: str) -> NoReturn:
    sentence = remedy(error)
    if sentence is None:
        raise error
    pytest.fail(f"{what} runs a server: {sentence}", pytrace=False)
