"""The evidence of a finding: the consumer groups that it concerns, and a sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from operator import or_
from typing import Any

from notify.protocol import ids
from notify.spark.checks.outbox_waiting import DROPPED, WAITS, WHY
from notify.spark.inputs.columns import COMMITTED, ROLLED_BACK
from notify.spark.judge.message_rows import DATABASE, PROVEN, UNKNOWN, UNMOVED, Groups
from notify.spark.result import Found

STATES = {1: "COMMITTED", 2: "ROLLED_BACK", 3: "COMMITTED and ROLLED_BACK"}
"""The outcomes that a server recorded."""
NOT_GIVEN = "a database that was not given"
"""Replaces the name of the database that messages came from."""
LOCAL = {1: "COMMITTED", 2: "ROLLED_BACK", UNKNOWN: "a state that no version writes"}


def groups_of(name: str, row: Mapping[str, Any], groups: Groups, inbox_groups: Collection[str]) -> list[str]:
    """The consumer groups that a finding of the class concerns. `inbox_groups`: those whose inbox was read."""

    def masks(kind: str) -> list[int]:
        return [row[f"{kind}{block}"] or 0 for block in range(groups.blocks)]

    if name == "UNDELIVERED":
        return groups.of([e & ~s for e, s in zip(masks("expected"), masks("settled"), strict=True)])
    if name in ("ACKED_NO_EFFECT", "UNGUARDED"):
        inboxes = [groups.mask(sorted(inbox_groups), block) for block in range(groups.blocks)]
        proven = masks(PROVEN) if PROVEN in groups.masks else [0] * groups.blocks
        chosen = proven if name == "UNGUARDED" else [~mask for mask in proven]
        blocks = zip(masks("acked"), inboxes, masks("effects"), masks("before_inbox"), chosen, strict=True)
        return groups.of([acked & inbox & ~effects & ~before & of for acked, inbox, effects, before, of in blocks])
    if name == "ORPHAN_ROW" and row["place"] is not None:
        readers = [row[f"readers{block}"] for block in range(groups.blocks)]
        readers = [-1 if mask is None else mask for mask in readers]
        receivers = zip(readers, masks("expected"), masks("settled"), masks("attempted"), strict=True)
        received = [reduce(or_, masks_of_block) for masks_of_block in receivers]
        return groups.of([effects & ~mask for effects, mask in zip(masks("effects"), received, strict=True)])
    kind = {"REDELIVERED": "attempted", "LEFT_OUT": "left"}.get(name)
    return groups.of(masks(kind)) if kind else []


def detail(name: str, row: dict[str, Any], case: Found) -> str:
    local = LOCAL.get(row["local"], "nothing")
    if name == "WITHDRAWN":
        return "withdrawn by its sender before it was due"
    if name == "CONFLICT" and row["outcomes"] == COMMITTED and row["local"] != ROLLED_BACK:
        return "withdrawn by its sender, and in a queue all the same"
    if name == "CONFLICT":
        return f"the database says {local}, the server {STATES[row['outcomes']]}"
    if name == "IN_DOUBT":
        return f"the half has no outcome; the database says {local}"
    if name == "LOST":
        if row["outcomes"] == 1:
            return "committed in the database and on the server, but in no queue"
        known = "only the half" if row["half_us"] else "no record of it"
        # Kafka keeps nothing of a topic that was deleted, also not who did it.
        where = "" if case.topic or row["half_us"] else "; its topic is in no log or cluster that was given"
        return f"committed in the database; the server has {known}{where}"
    if name in ("UNSENT", "DROPPED"):
        of_storage = WAITS if name == "UNSENT" else DROPPED
        return f"committed in the database; {WHY[row['t_state'] // UNMOVED % 4 or of_storage]}"
    if name == "GHOST":
        return "in a queue; the database " + ("rolled it back" if row["local"] == 2 else "has no row for it")
    if name == "DUP_ENQUEUE":
        return f"in {row['places']} places, the first at offset {row['offset']}"
    if name == "UNDELIVERED":
        return f"not settled by {', '.join(case.groups)}"
    if name == "LEFT_OUT":
        return f"left the queue unsettled by {', '.join(case.groups)}"
    if name == "ACKED_NO_EFFECT":
        return f"acknowledged by {', '.join(case.groups)}, whose inbox has no row"
    if name == "UNGUARDED":
        return f"took effect in {', '.join(case.groups)}, as --effects proves, and the inbox has no row"
    if name == "REDELIVERED":
        return f"delivered again to {', '.join(case.groups)}"
    if name in ("ORPHAN_ROW", "FORGOTTEN"):
        if case.groups and name == "ORPHAN_ROW":
            return f"an inbox row of {', '.join(case.groups)}, which never subscribed to the topic"
        return "a tombstone without a half" if row["local"] == 2 else "an inbox row of a message that is in no queue"
    if name == "ALTERED":
        if row["topic"] != row["other_topic"]:
            return f"the local row and the log name different topics, one of them {case.topic or 'in no log'}"
        if row["digest"] != row["other_digest"]:
            return "body, key or tag in the queue differ from the local row"
        if row["producer_group"] != row["other_producer_group"]:
            return f"the local row and the log name different producer groups, one of them {case.producer_group}"
        if row["t_state"] // DATABASE != row["other_state"] // DATABASE:
            return f"database {case.database} and another database have a local row of the message"
        return f"the row is in database {case.database}, and its half came from another database"
    if name == "MISDATED":
        return _misdated(row)
    if name == "MALFORMED":
        return f"the local row has {local}"
    if name == "DUP_EFFECT":
        return "inboxes of several databases have a row of the message for the same group"
    return ""


def _misdated(row: dict[str, Any]) -> str:
    """Names the time of the row that lies furthest from the time in its id."""
    made_us = 1000 * ids.milliseconds(bytes(row["id"]))
    distances_us = {
        subject: row[name] - made_us
        for name, subject in (("t_us", "the local row"), ("half_us", "the half"), ("effect_us", "the inbox row"))
        if row[name] is not None
    }
    subject = max(distances_us, key=lambda name: abs(distances_us[name]))
    hours = distances_us[subject] / 3.6e9
    return f"{subject} is dated {abs(hours):,.2f} hours {'after' if hours > 0 else 'before'} its id was made"
