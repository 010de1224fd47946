"""Fixtures that the campaigns of this room share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short: MariaDB's socket lies in it."""
    made = Path(tempfile.mkdtemp(prefix="notify-c-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)
