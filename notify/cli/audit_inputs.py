"""Opens the inputs that an audit's flags name, and a Spark session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy.exc import ArgumentError

from notify.errors import InvalidRequest, Unavailable

MOST_SCHEMAS = 200
"""Spark plans the reads of every schema at once."""

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from notify.spark.inputs.databases import Database
    from notify.spark.inputs.log_files import SegmentFile
    from notify.spark.result import Inputs


def named_logs(given: Sequence[str]) -> list[tuple[str, str]]:
    """The (name, place) of each `NAME=PLACE`; without NAME it is the last part of the place, or the whole place if that
    is not unique."""
    pairs = []
    for text in given:
        name, equals, place = text.partition("=")
        pairs.append((name, place) if equals and "/" not in name else (text.rstrip("/").rpartition("/")[2], text))
    names = [name for name, _ in pairs]
    return [(name if names.count(name) == 1 else place, place) for name, place in pairs]


class Schemas(NamedTuple):
    """The flags that name schemas of the databases, as they were given: `--schema` and `--schemas`."""

    named: list[str]
    patterns: list[str]

    def of(self, name: str) -> tuple[list[str], str]:
        """The schemas, and the patterns, of the database of a flag, by its name."""
        return _of_name(self.named, name), ",".join(_of_name(self.patterns, name))

    def check(self, names: set[str]) -> None:
        """Raises InvalidRequest for a flag that names a database which was not given."""
        for flag, texts in (("--schema", self.named), ("--schemas", self.patterns)):
            for text in texts:
                name, equals, _ = text.partition("=")
                if equals and name not in names:
                    raise InvalidRequest(
                        f"{flag} {text}: no database {name} was given: name it with --database {name}=URL"
                    )


def _of_name(texts: list[str], name: str) -> list[str]:
    """The values for a name among texts such as `NAME=VALUE`, or `VALUE` for every name."""
    parts = [text.partition("=") for text in texts]
    return [value if equals else first for first, equals, value in parts if not equals or first == name]


def named_url(text: str) -> tuple[str, str]:
    """The (name, URL) of `NAME=URL`, or of a URL: then the name is the database's."""
    name, equals, url = text.partition("=")
    if equals and "://" not in name:
        return name, url
    return "", text


@dataclass(frozen=True)
class InputFlags:
    """The flags that name the inputs of an audit, as they were given."""

    database: Sequence[str]
    log: Sequence[str]
    kafka: Sequence[str] = ()
    storage: Sequence[str] = ()
    records: Sequence[str] = ()
    schemas: Schemas = field(default_factory=lambda: Schemas([], []))
    most_lag_seconds: float = 0.0

    def checked(self) -> InputFlags:
        """The flags themselves. Raises InvalidRequest if one is missing, and Unavailable if Spark is not installed."""
        if not self.database:
            raise InvalidRequest("name each service's database with --database URL")
        if not (self.log or self.kafka):
            raise InvalidRequest(
                "name the queues with --log (a server's --data-dir, or what it ships to) or --kafka URL"
            )
        try:
            import pyarrow  # noqa: F401
            import pyspark  # noqa: F401
        except ModuleNotFoundError as error:
            raise Unavailable(f"the audit needs `pip install 'notify-tx[audit]'` ({error.name} is missing)") from None
        return self

    @contextmanager
    def opened(self) -> Iterator[Inputs]:
        """Open the inputs. Raises the errors of the inputs."""
        from notify.spark.inputs.actions import place_of_records
        from notify.spark.inputs.databases import Database
        from notify.spark.inputs.log_input import LogInput
        from notify.spark.result import Inputs

        databases: list[Database] = []
        storages: list[Database] = []
        try:
            for text in self.database:
                for each in _sources(text, self.most_lag_seconds, self.schemas):
                    databases.append(each)
            self.schemas.check({each.given for each in databases})
            for text in self.storage:
                name, url = named_url(text)
                storages.append(Database(url, name, self.most_lag_seconds, is_storage=True))
            readers: list[Any] = []
            if self.kafka:
                from notify.spark.inputs.kafka_input import KafkaInput

                readers = [KafkaInput(url) for url in self.kafka]
            logs = [LogInput(directory, name) for name, directory in named_logs(self.log)]
            yield Inputs(databases, logs, readers, storages, list(map(place_of_records, self.records)))
        finally:
            for opened_database in (*databases, *storages):
                opened_database.close()


def _sources(text: str, most_lag_seconds: float, schemas: Schemas) -> Iterator[Database]:
    """The databases of one flag: one for each schema."""
    from notify.spark.inputs.databases import Database, schemas_in
    from notify.storage.sql.engines import parsed_url

    name, url = named_url(text)
    given = name
    if not given and (schemas.named or schemas.patterns):
        with suppress(ArgumentError):  # `Database` says what is wrong with the URL
            given = parsed_url(url).database or ""
    named, patterns = schemas.of(given)
    found = schemas_in(url, f"--database {name}".rstrip(), patterns) if patterns else []
    several = list(dict.fromkeys([*named, *found]))
    if len(several) > MOST_SCHEMAS:
        raise InvalidRequest(
            f"--schemas: {len(several):,} schemas of database {given} match, and an audit reads at most "
            f"{MOST_SCHEMAS}: write narrower patterns, and audit the others apart"
        )
    for schema in several or [""]:
        shown = f"{given}.{schema}" if patterns or len(several) > 1 else name
        yield Database(url, shown, most_lag_seconds, schema=schema, given=given)


@contextmanager
def session(
    master: str, memory: str, *, small: bool = False, say: Callable[[str], None] = lambda text: None
) -> Iterator[SparkSession]:
    """A Spark session, stopped at the end. Raises Unavailable if Spark cannot start."""
    say("starting Spark")
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    from notify.spark.session import open_session

    spark = open_session(master, memory, small=small)
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
