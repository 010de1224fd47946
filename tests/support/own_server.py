"""A server of a test's own, in a directory that goes with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from notify.errors import Unavailable
from notify.testing.reachable import NotAvailable


class Stoppable(Protocol):
    def stop(self) -> object: ...


S = TypeVar("S", bound=Stoppable)


@contextmanager
def own_server(name: str, start: Callable[[Path], S]) -> Iterator[S]:
    """Start a server in a new directory (`start`), and stop it at the end; skip with the reason where there is none."""
    directory = Path(tempfile.mkdtemp(prefix=f"notify-{name}-"))
    try:
        try:
            server = start(directory)
        except (NotAvailable, Unavailable) as reason:
            pytest.skip(str(reason))
        yield server
        server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
