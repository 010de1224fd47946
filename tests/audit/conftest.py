"""One Spark session for all tests of the audit, because starting a JVM takes longer than most tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from notify.errors import Unavailable


@pytest.fixture(scope="package")
def spark() -> Iterator[Any]:
    pyspark = pytest.importorskip("pyspark")
    assert pyspark
    from notify.spark.session import open_session

    try:
        session = open_session(memory="2g", small=True)
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield session
    session.stop()
    # Collects here what pyspark leaves unclosed, so that no other test gets the warning.
    del session
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
