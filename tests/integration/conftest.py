"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from notify.client import create_tables
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.issuer import Issuer
from tests.support.servers import stop_if_running
from tests.support.shop import Base, make_async_engine, make_engine
from tests.support.webhook import Receiver


@pytest.fixture
def sqlite_engine(tmp_path: Path) -> Iterator[sa.Engine]:
    """As `shop_engine`, for tests that no difference between databases concerns."""
    engine = make_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def async_engine(sqlite_engine: sa.Engine) -> AsyncEngine:
    """The same database for coroutines. It keeps no connections, which would belong to a loop."""
    return make_async_engine(sqlite_engine.url, poolclass=sa.NullPool)


@pytest.fixture
def frozen() -> Iterator[InMemoryServer]:
    """A server for this test alone, whose clock stands still: no check finds an outcome that was not sent."""
    with InMemoryServer() as server:
        server.freeze()
        yield server


@pytest.fixture
def away(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that is not running yet, but whose address is known."""
    made = ServerProcess(tmp_path / "data")
    made.url = f"http://127.0.0.1:{made._port}"
    yield made
    stop_if_running(made)


@pytest.fixture(scope="module")
def killed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that tests kill and start again."""
    server = ServerProcess(tmp_path_factory.mktemp("killed")).start()
    yield server
    stop_if_running(server)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Takes webhooks."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """An identity provider."""
    made = Issuer()
    yield made
    made.close()
