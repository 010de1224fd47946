"""Decides whether items may still be carried out, by the present state of their messages."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from notify.spark.inputs.effects import BusinessEffects
from notify.spark.repair.current_state import (
    NONE,
    Effects,
    LocalRow,
    Places,
    effects_of,
    places_of,
    rows_of,
    why_expired,
    why_malformed,
    why_unmoved,
)
from notify.spark.repair.plan import Item
from notify.spark.result import Inputs

HELD = 0


class Settled(NamedTuple):
    """The status of an item that is not carried out: 200: it was done before; 0: it is held back."""

    status: int
    why: str


@dataclass(frozen=True, slots=True)
class Now:
    """The state of some items in databases and logs."""

    effects: Mapping[str, Effects]
    rows: Mapping[str, list[LocalRow]]
    places: Places
    inbox_from_us: int

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        items: Sequence[Item],
        scratch: Path | str,
        known_unread: Collection[str] = (),
        queries: Sequence[BusinessEffects] = (),
        known_groups: Collection[str] = (),
    ) -> Now:
        """`known_unread`: see `places_of`. `queries`: proofs of effects in addition to inboxes. `known_groups`: see
        `effects_of`.

        Raises Unavailable where an input does not answer."""
        names = [item.message_id for item in items]
        both = names + [item.again for item in items if item.again]
        # The logs first: the effect of a message that enters a queue later is later still.
        places = places_of(inputs.logs, both, scratch, known_unread)
        effects = effects_of(inputs.databases, both, queries, known_groups)
        rows = rows_of(inputs.databases, names)
        return cls(effects, rows, places, max((database.purged()[1] for database in inputs.databases), default=0))

    def settled(self, item: Item) -> Settled | None:
        """Why an item is not carried out; None if it may be."""
        if item.action == "decide":
            return self._held(self._why_not_decide(item))
        if item.again in self.places.queued:
            return Settled(200, "it was sent again before")
        return self._held(
            self._why_not_republish(item) if item.action == "republish" else self._why_not_redeliver(item)
        )

    def is_undone(self, item: Item, done_us: int) -> bool:
        """Whether nothing is left of a repair that was done: a log may have been replaced by an older copy. `done_us`:
        when, in microseconds since 1970; that retention dropped it since, or that it was not shipped to a store yet, is
        no sign."""
        if done_us > self.places.until_us:
            return False
        if item.action == "decide":
            return item.message_id in self.places.undecided
        is_there = item.again in self.places.queued or item.again in self.places.waiting
        return not is_there and not self._of(item) and done_us >= self.places.from_us

    @staticmethod
    def _held(why: str) -> Settled | None:
        return Settled(HELD, why) if why else None

    def _of(self, item: Item) -> Effects:
        return self.effects.get(item.message_id, NONE) | self.effects.get(item.again, NONE)

    def _why_not_decide(self, item: Item) -> str:
        states = {row.state for row in self.rows.get(item.message_id, ())}
        if effects := self._of(item):
            return f"{effects} since the plan was made"
        if item.outcome == "commit" and states != {"COMMITTED"}:
            return "the database no longer reports a commit: make a new plan"
        if item.outcome == "rollback" and "COMMITTED" in states:
            return "the database says commit by now: make a new plan"
        return ""

    def _why_not_republish(self, item: Item) -> str:
        rows = self.rows.get(item.message_id, [])
        effects = self._of(item)
        # A group's inbox skips messages that it knows, but not those whose effect only --effects proves.
        if effects.unguarded or effects.inboxes - set(item.skipped_by):
            return str(effects)
        if item.message_id in self.places.queued:
            return "it is in a queue by now"
        if item.message_id in self.places.waiting:
            return "it waits for its time"
        if item.message_id in self.places.undecided:
            return "the server has no outcome of it: decide that first"
        if {row.state for row in rows} != {"COMMITTED"}:
            return "no given database has it as committed"
        if why := why_unmoved(rows) or why_malformed(rows) or why_expired(rows, time.time_ns() // 1000):
            return why
        if rows[0].digest != item.content:
            return "the local row has changed since the plan was made"
        return self._why_not_judged(item)

    def _why_not_redeliver(self, item: Item) -> str:
        return self._of(item).why_not_to(item.group) or self._why_not_judged(item)

    def _why_not_judged(self, item: Item) -> str:
        since_us = int(
            item.evidence.get("acked_us") or item.evidence.get("queued_us") or item.evidence.get("t_us") or 0
        )
        if since_us < self.inbox_from_us:
            return "rows of inboxes from that time are purged by now, so it is unknown whether it took effect"
        return ""
