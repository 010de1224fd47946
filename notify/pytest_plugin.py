"""The pytest fixture `notify_server`: a server in memory for each test. Small, because every pytest run loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from notify.testing.server import InMemoryServer


@pytest.fixture
def notify_server() -> Iterator[InMemoryServer]:
    """A server in memory. Needs the extra `server`."""
    from notify.testing.server import InMemoryServer

    with InMemoryServer() as server:
        yield server
