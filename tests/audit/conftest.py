"""One Spark session for all tests of the audit, because starting a JVM takes longer than most tests; and a trade."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.errors import Unavailable
from notify.testing.process import ServerProcess
from tests.audit.shop import Shop
from tests.audit.trade import Trade, make_trade
from tests.support.databases import empty_database
from tests.support.receiver import Receiver

INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Each query of a test runs once, over some hundred rows: to compile it is a fourth of the CPU time of an audit."""


@pytest.fixture(scope="package")
def spark(pytestconfig: pytest.Config) -> Iterator[Any]:
    """In `make test` Spark interprets what it compiles elsewhere: in `make test-long`, and where a command is run."""
    pyspark = pytest.importorskip("pyspark")
    assert pyspark
    from notify.spark.session import open_session

    try:
        session = open_session(memory="2g", small=True)
    except Unavailable as reason:
        pytest.skip(str(reason))
    if pytestconfig.getoption("markexpr") == "not long":
        for name, value in INTERPRETED.items():
            session.conf.set(name, value)
    yield session
    session.stop()
    # Collects here what pyspark leaves unclosed, so that no other test gets the warning.
    del session
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="package")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Trade:
    return make_trade(tmp_path_factory.mktemp("sound") / "trade")


@pytest.fixture
def trade(sound: Trade, tmp_path: Path) -> Trade:
    """A copy to harm."""
    return sound.copy(tmp_path / "trade")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with its log in `data`."""
    process = ServerProcess(tmp_path / "data").start()
    yield process
    process.stop()


@pytest.fixture
def shop(database_urls: dict[str, str], server: ServerProcess, tmp_path: Path) -> Iterator[Shop]:
    """A shop over the `server` of the test's file."""
    with (
        empty_database("postgresql", database_urls, tmp_path) as url,
        contextlib.closing(Shop(url, server.url)) as shop,
    ):
        yield shop


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of a watch's alarms."""
    with contextlib.closing(Receiver()) as receiver:
        yield receiver
