"""The pytest fixture `notify_server`, an in-memory server for each test. Every pytest run loads this small module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from notify.runtime.extras import remedy

if TYPE_CHECKING:
    from notify.testing.server import InMemoryServer


@pytest.fixture
def notify_server() -> Iterator[InMemoryServer]:
    """An in-memory server. Needs the extra `server`."""
    try:
        from notify.testing.server import InMemoryServer
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        pytest.fail(f"the fixture notify_server runs a server: {sentence}", pytrace=False)

    with InMemoryServer() as server:
        yield server
