"""The service against a server in memory, and the database that SHOP_DATABASE names, with its migrations."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from notify.testing import InMemoryServer

SERVER = InMemoryServer().start()
os.environ["SHOP_NOTIFY"] = SERVER.url  # before the service is imported, which reads it


@pytest.fixture(scope="session")
def server() -> Iterator[InMemoryServer]:
    yield SERVER
    SERVER.stop()


@pytest.fixture(scope="session")
def client(server: InMemoryServer) -> Iterator[TestClient]:
    directory = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "alembic", "upgrade", "head"], cwd=directory, check=True)
    from shop.api import app

    with TestClient(app) as client:
        yield client


@pytest.fixture(autouse=True)
def empty(client: TestClient) -> None:
    from shop.points import engine

    with engine.begin() as connection:
        connection.execute(sa.text("TRUNCATE orders, points, notify_inbox"))
