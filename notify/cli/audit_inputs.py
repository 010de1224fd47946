"""Opens the inputs that an audit's flags name, and a Spark session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from notify.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from notify.spark.log_files import SegmentFile
    from notify.spark.result import Inputs


def named_logs(given: list[str]) -> list[tuple[str, str]]:
    """The (name, place) of each `NAME=PLACE`; without NAME it is the last part of the place, or the whole place if that
    is not unique."""
    pairs = []
    for text in given:
        name, equals, place = text.partition("=")
        pairs.append((name, place) if equals and "/" not in name else (text.rstrip("/").rpartition("/")[2], text))
    names = [name for name, _ in pairs]
    return [(name if names.count(name) == 1 else place, place) for name, place in pairs]


@contextmanager
def opened(
    database: list[str], log: list[str], kafka: list[str], storage: list[str], most_lag_seconds: float = 0.0
) -> Iterator[Inputs]:
    """Open the inputs that the flags name. Raises the errors of the inputs."""
    from notify.spark.databases import Database
    from notify.spark.log_input import LogInput
    from notify.spark.result import Inputs

    databases: list[Database] = []
    try:
        for text in (*database, *storage):
            name, equals, url = text.partition("=")
            is_named = equals and "://" not in name
            databases.append(Database(url if is_named else text, name if is_named else "", most_lag_seconds))
        readers: list[Any] = []
        if kafka:
            from notify.spark.kafka_input import KafkaInput

            readers = [KafkaInput(url) for url in kafka]
        logs = [LogInput(directory, name) for name, directory in named_logs(log)]
        yield Inputs(databases[: len(database)], logs, readers, databases[len(database) :])
    finally:
        for opened_database in databases:
            opened_database.close()


@contextmanager
def session(
    master: str, memory: str, *, small: bool = False, say: Callable[[str], None] = lambda text: None
) -> Iterator[SparkSession]:
    """A Spark session, stopped at the end. Raises Unavailable if Spark is not installed or cannot start."""
    say("starting Spark")
    try:
        from notify.spark.session import open_session
    except ModuleNotFoundError as error:
        raise Unavailable(f"the audit needs `pip install 'notify-tx[audit]'` ({error.name} is missing)") from None
    spark = open_session(master, memory, small=small)
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        yield spark
    finally:
        with suppress(OSError, Py4JError):  # a JVM that died cannot be stopped, and its death was reported
            spark.stop()


def is_small(inputs: Inputs, from_us: int = 0) -> bool:
    """Whether Spark can read the data of these inputs since `from_us` within seconds."""
    from notify.spark.session import SMALL_BYTES

    sizes = [_bytes_since(segment, from_us) for log in inputs.logs for segment in log.segments]
    return not inputs.kafka and sum(sizes) <= SMALL_BYTES


def _bytes_since(segment: SegmentFile, from_us: int) -> int:
    """About how much of a segment was written since an instant."""
    end_us = min(segment.until_us, time.time_ns() // 1000)
    whole_us = max(1, end_us - segment.created_us)
    return segment.size * min(whole_us, max(0, end_us - from_us)) // whole_us


def opened_here(
    database: list[str], log: list[str], kafka: list[str], storage: list[str], most_lag_seconds: float = 0.0
) -> Any:
    """`opened`, after checking the flags, and that pyspark is installed."""
    if not database:
        raise InvalidRequest("name each service's database with --database URL")
    if not (log or kafka):
        raise InvalidRequest("name the queues with --log (a server's --data-dir, or what it ships to) or --kafka URL")
    try:
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unavailable(f"the audit needs `pip install 'notify-tx[audit]'` ({error.name} is missing)") from None
    return opened(database, log, kafka, storage, most_lag_seconds)
