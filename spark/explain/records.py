"""Records of repairs: what servers noted of an operator's writes, and the journals of plans."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.spark.inputs.actions import Record, recorded
from notify.spark.repair.journal import lines_of
from notify.spark.repair.plan import Item, read_plan
from notify.spark.result import Inputs
from notify.storage.sql.administration import server_action

MOST = 1000
"""The most records of one server that are looked at, the newest first."""


def records_of(inputs: Inputs, transaction: str, plans: Sequence[Path]) -> list[Record]:
    """The records that may concern a transaction, the oldest first."""
    records = recorded(inputs, _concerns(transaction), MOST)
    for path in plans:
        records += _of_plan(path, transaction)
    return sorted(records, key=lambda record: record.at_us)


def _concerns(transaction: str) -> sa.ColumnElement[bool]:
    """Writes that name it, and redrives and drops of many dead letters, which name none."""
    c = server_action.c
    named = c.result.contains(transaction, autoescape=True) | c.target.startswith(transaction, autoescape=True)
    return named | c.what.in_(("dead_letter.redrive", "dead_letter.drop"))


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
