"""Records of repairs: what servers noted of an operator's writes, and the journals of plans."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from notify.spark.databases import Database
from notify.spark.log_input import LogInput
from notify.spark.places import is_store
from notify.spark.repair.journal import lines_of
from notify.spark.repair.plan import Item, read_plan
from notify.spark.result import Inputs
from notify.storage.sql.administration import server_action

MOST = 1000
"""The most records of one server that are looked at, the newest first."""
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


def records_of(inputs: Inputs, transaction: str, plans: Sequence[Path]) -> list[Record]:
    """The records that may concern a transaction, the oldest first."""
    records: list[Record] = []
    for log in inputs.logs:
        records += _beside(log, transaction)
    for storage in inputs.storages:
        records += _in_storage(storage, transaction)
    for path in plans:
        records += _of_plan(path, transaction)
    return sorted(records, key=lambda record: record.at_us)


def _chosen(transaction: str) -> sa.Select[Any]:
    """Writes that name it, and redrives and drops of many dead letters, which name none."""
    c = server_action.c
    named = c.result.contains(transaction, autoescape=True) | c.target.startswith(transaction, autoescape=True)
    columns = [c[name] for name in _COLUMNS]
    return (
        sa.select(*columns)
        .where(named | c.what.in_(("dead_letter.redrive", "dead_letter.drop")))
        .order_by(c.id.desc())
        .limit(MOST)
    )


def _beside(log: LogInput, transaction: str) -> Iterator[Record]:
    """Records of the server whose log it is: its own database is beside the log, if the data directory was given."""
    path = Path(log.files.place).parent / "admin.db"
    if is_store(log.files.place) or not path.is_file():
        return
    reader = sa.create_engine(f"sqlite:///file:{quote(str(path.absolute()))}?mode=ro&uri=true")
    try:
        with reader.connect() as connection:
            for row in connection.execute(_chosen(transaction)).mappings():
                yield _record(f"log {log.name}", dict(row))
    except sa.exc.OperationalError:
        return  # its server has just been started for the first time, or another user owns it
    finally:
        reader.dispose()


def _in_storage(storage: Database, transaction: str) -> Iterator[Record]:
    if server_action.name in storage.tables:
        with storage.reading() as connection:
            for row in connection.execute(_chosen(transaction)).mappings():
                yield _record(f"storage {storage.name}", dict(row))


def _record(source: str, row: dict[str, Any]) -> Record:
    return Record(source=source, **row)


def _of_plan(path: Path, transaction: str) -> Iterator[Record]:
    """The items of a plan that concern it, with what the journal beside it says. Raises InvalidRequest."""
    plan = read_plan(path)
    items: dict[str, Item] = {i.key: i for i in plan.items if i.message_id.partition(".")[0] == transaction}
    begun: dict[str, dict[str, Any]] = {}
    for line in lines_of(path):
        item = items.get(line["key"])
        if item is None:
            continue
        if line["state"] == "begun":
            begun[item.key] = line
            continue
        start = begun.get(item.key, {})
        result = {"id": item.message_id, "as": line.get("as", ""), "status": line["status"], "detail": line["detail"]}
        yield Record(
            start.get("at_us", 0), f"plan {path.name}", start.get("who", ""), f"plan.{item.action}", item.group,
            start.get("reason", "no reason was noted"), json.dumps({"items": [result]}),
        )  # fmt: skip
