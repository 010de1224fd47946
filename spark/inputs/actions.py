"""Servers' records of their administrators' writes: who did what, when and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from notify.errors import HiddenRows, InvalidRequest, ObjectStoreFailed, Unavailable
from notify.runtime.guarantees import SELECT, Need, faults
from notify.runtime.urls import without_secrets
from notify.spark.inputs.databases import Database, reads_any_text
from notify.spark.inputs.find_log import is_store
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs
from notify.storage.shipped.records import NAME as RECORDS
from notify.storage.sql.administration import server_action
from notify.storage.sql.engines import open_engine

NOBODY_KNOWS = "who did it is in no record that was given"
_COLUMNS = ("at_us", "who", "what", "target", "reason", "result")


@dataclass(frozen=True)
class Record:
    """One write of an operator, or one item of a plan that was carried out."""

    at_us: int
    """Microseconds since 1970; 0: not known."""
    source: str
    """The server's log or storage, or the plan's file."""
    who: str
    what: str
    """The action: message.republish, dead_letter.redrive, …"""
    target: str
    reason: str
    result: str
    """The outcome, as JSON."""

    def names(self, message_id: str) -> bool:
        """Whether it says what came of this message, or of its transaction."""
        transaction = message_id.partition(".")[0]
        return f'"{message_id}"' in self.result or self.target == transaction

    @property
    def by(self) -> str:
        """Who did it and why, in words."""
        return f"by {self.who or 'an operator without a name'}: {self.reason}"


def recorded(inputs: Inputs, condition: sa.ColumnElement[bool], most: int) -> list[Record]:
    """The records that meet a condition, the oldest first: of each server at most the `most` newest."""
    chosen = (
        sa.select(*[server_action.c[name] for name in _COLUMNS])
        .where(condition)
        .order_by(server_action.c.id.desc())
        .limit(most)
    )
    records: list[Record] = []
    for log in inputs.logs:
        records += _beside(log, chosen)
    for storage in inputs.storages:
        records += _in_storage(storage, chosen)
    for place in inputs.records:
        records += _at(place, chosen)
    return sorted(records, key=lambda record: record.at_us)


def place_of_records(text: str) -> str:
    """The place that a flag names: a URL, or the path of a data directory's `admin.db`. Raises InvalidRequest."""
    if is_store(text):
        return text
    path = Path(text) / RECORDS
    if not path.is_file():
        raise InvalidRequest(f"--records {text}: there is no {RECORDS}; name the --data-dir of a server")
    return str(path)


def _at(place: str, chosen: sa.Select[Any]) -> Iterator[Record]:
    """Records at a place of `place_of_records`. Raises InvalidRequest, or Unavailable if it does not answer."""
    if not is_store(place):
        yield from _in_file(Path(place), f"records {Path(place).parent.name}", chosen)
        return
    engine = open_engine(place, named="--records", pooled=False)
    try:
        with engine.connect() as connection:
            for fault in faults(connection, [Need(server_action, "", (SELECT,), keeps=False)]):
                raise HiddenRows(f"--records {without_secrets(place)}: {fault}")
            for row in connection.execute(chosen).mappings():
                yield _record(f"records {engine.url.database}", row)
    except sa.exc.DBAPIError as error:
        raise Unavailable(f"--records {without_secrets(place)} cannot be read: {error.orig}") from None
    finally:
        engine.dispose()


def _record(source: str, row: sa.RowMapping) -> Record:
    """The record of a row. SQLite has any type in any column."""
    at_us = row["at_us"] if isinstance(row["at_us"], int) else 0
    return Record(at_us, source, *[str(row[name] or "") for name in _COLUMNS[1:]])


def _beside(log: LogInput, chosen: sa.Select[Any]) -> Iterator[Record]:
    """Records of the server whose log it is: its own database is next to the log, or was shipped with it."""
    try:
        with log.files.administration() as paths:
            for path in paths:
                yield from _in_file(path, f"log {log.name}", chosen)
    except ObjectStoreFailed:
        return  # the audit of the log says that its store lacks something


def _in_file(path: Path, source: str, chosen: sa.Select[Any]) -> Iterator[Record]:
    reader = sa.create_engine(f"sqlite:///file:{quote(str(path.absolute()))}?mode=ro&uri=true")
    sa.event.listen(reader, "connect", reads_any_text)
    try:
        with reader.connect() as connection:
            for row in connection.execute(chosen).mappings():
                yield _record(source, row)
    except sa.exc.DatabaseError:
        return  # its server has just been started for the first time, or another user owns it
    finally:
        reader.dispose()


def _in_storage(storage: Database, chosen: sa.Select[Any]) -> Iterator[Record]:
    if server_action.name in storage.tables:
        with storage.reading() as connection:
            for row in connection.execute(chosen).mappings():
                yield _record(f"storage {storage.name}", row)
