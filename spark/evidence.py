"""The evidence of a finding, in words."""

from __future__ import annotations

from typing import Any

from notify.spark.result import Found

STATES = {1: "COMMITTED", 2: "ROLLED_BACK", 3: "COMMITTED and ROLLED_BACK"}


def detail(name: str, row: dict[str, Any], case: Found) -> str:
    local = STATES.get(row["local"], "nothing")
    if name == "CONFLICT":
        return f"the database says {local}, the server {STATES[row['outcomes']]}"
    if name == "IN_DOUBT":
        return f"the half has no outcome; the database says {local}"
    if name == "LOST":
        if row["outcomes"] == 1:
            return "committed in the database and on the server, but in no queue"
        return "committed in the database; the server has " + ("only the half" if row["half_us"] else "no record of it")
    if name == "GHOST":
        return "in a queue; the database " + ("rolled it back" if row["local"] == 2 else "has no row for it")
    if name == "DUP_ENQUEUE":
        return f"in {row['places']} places, the first at offset {row['offset']}"
    if name == "UNDELIVERED":
        return f"not settled by {', '.join(case.groups)}"
    if name == "ACKED_NO_EFFECT":
        return f"acknowledged by {', '.join(case.groups)}, whose inbox has no row"
    if name == "REDELIVERED":
        return f"delivered again to {', '.join(case.groups)}"
    if name == "ORPHAN_ROW":
        return "a tombstone without a half" if row["local"] == 2 else "an inbox row of a message that is in no queue"
    return ""
