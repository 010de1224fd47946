"""Carries out a plan through the server's admin routes: exactly its items, each checked again and recorded.

The present databases and logs count: an item is not carried out if its message took effect, came into a queue or into
doubt since the plan was made. The server refuses the same for its own queues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from notify.admin_api.actor import actor
from notify.check import HalfMessage, Outcome
from notify.check.listener import CheckUnavailable
from notify.check.local import answer
from notify.client.transport.http import HttpClient
from notify.errors import ForeignAnswer, NotifyError
from notify.protocol.wire import JSON, instant
from notify.spark.inputs.databases import Database
from notify.spark.inputs.effects import BusinessEffects, business_effects
from notify.spark.repair.checks import HELD, Now
from notify.spark.repair.current_state import AT_ONCE, LocalRow, parts
from notify.spark.repair.journal import Journal, done_in, lines_of
from notify.spark.repair.plan import Item, RepairPlan
from notify.spark.repair.planning import identities_of, names_of
from notify.spark.result import Inputs

CALL_SECONDS = 60.0
DECIDED_AT_ONCE = 20
"""Outcomes between two lines of the journal: each is a request of its own."""
Row = dict[str, Any]


class Repair:
    """Carries out items of plans."""

    def __init__(
        self,
        inputs: Inputs,
        url: str,
        reason: str,
        scratch: Path | str,
        *,
        effects: Sequence[tuple[str, str]] = (),
        force: bool = False,
    ) -> None:
        """`effects`: queries for effects in addition to the plan's. `scratch`: the directory for copies of the logs'
        segments. `reason` is recorded with each repair.

        `force`: send a group even messages from before its inbox began, which the server refuses otherwise, and repeat
        items that the journal says were done but of which nothing is left.
        """
        self._inputs = inputs
        self._url = url
        self._reason = reason
        self._scratch = scratch
        self._force = force
        self._effects = tuple(effects)
        self._queries: Sequence[BusinessEffects] = ()
        self._dry_run = False
        self._known_unread: Sequence[str] = ()
        self._known_groups: Sequence[str] = ()

    async def run(
        self, plan: RepairPlan, path: Path, say: Callable[[Row], None] = lambda row: None, *, dry_run: bool = False
    ) -> list[Row]:
        """A row for each item: key, finding, message_id, action, group, what, status (of HTTP; 0: held back), detail,
        as, and was_before: whether an earlier repair did it.

        `path`: the plan's file; the journal is in the same directory. `say` gets each row when it is known. With
        `dry_run` nothing changes. Raises Conflict if another process carries out this plan, Unavailable if an input is
        unreachable, InvalidRequest if an input of the plan's audit is missing, and HiddenRows.
        """
        for database in (*self._inputs.databases, *self._inputs.storages):
            database.check_seen()
        plan.check_inputs(names_of(self._inputs), identities_of(self._inputs))
        self._known_unread, self._known_groups = plan.unread, plan.groups
        self._queries = business_effects(self._inputs.databases, dict.fromkeys([*plan.effects, *self._effects]))
        for query in self._queries:
            query.check_seen()
        self._dry_run = dry_run
        rows: dict[str, Row] = {}
        http = HttpClient(self._url)
        try:
            with nullcontext() if dry_run else Journal(path, plan.made_at, actor(), self._reason) as journal:
                done = done_in(lines_of(path)) if journal is None else dict(journal.done)
                for row in self._done_before([item for item in plan.items if item.key in done], done):
                    rows[row["key"]] = row
                    say(row)
                for several in _alike([item for item in plan.items if item.key not in rows]):
                    for row in await self._batch(http, several, journal):
                        rows[row["key"]] = row
                        say(row)
        finally:
            http.close()
        return [rows[item.key] | {"dry_run": dry_run} for item in plan.items]

    def _done_before(self, items: Sequence[Item], done: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
        """Rows for items that the journal says were done, compared with the present logs. With `force`,
        those of which nothing is left have no row: they are carried out again."""
        for several in parts(items):
            now = self._now(several)
            for item in several:
                line = done[item.key]
                done_us = line.get("at_us", 0)
                if not now.is_undone(item, done_us):
                    yield _row(item, line["status"], "done before") | {"was_before": True}
                elif not self._force:
                    yield _row(
                        item, HELD,
                        f"the journal says that it was done ({instant(done_us)}), and nothing is left of it: a log "
                        "may be an older copy; --force does it again",
                    )  # fmt: skip

    def _now(self, items: Sequence[Item]) -> Now:
        return Now.of(self._inputs, items, self._scratch, self._known_unread, self._queries, self._known_groups)

    async def _batch(self, http: HttpClient, items: Sequence[Item], journal: Journal | None) -> list[Row]:
        """Check items of one kind, and carry out those that may be."""
        now = self._now(items)
        settled = {item.key: fate for item in items if (fate := now.settled(item)) is not None}
        rows = {
            item.key: _row(item, *settled[item.key]) | {"was_before": settled[item.key].status == 200}
            for item in items
            if item.key in settled
        }
        ready = [item for item in items if item.key not in rows]
        if journal is not None:
            journal.begin(item.key for item in ready)
        if ready and ready[0].action == "decide":
            done = [await self._decide(http, item) for item in ready]
        elif ready and ready[0].action == "republish":
            done = await self._republish(http, ready, now)
        elif ready:
            done = await self._redeliver(http, ready)
        else:
            done = []
        rows |= {row["key"]: row for row in done}
        if journal is not None:
            journal.note({name: row[name] for name in ("key", "status", "detail", "as")} for row in rows.values())
        return [rows[item.key] for item in items]

    # --- outcomes ---------------------------------------------------------------------------------------------

    async def _decide(self, http: HttpClient, item: Item) -> Row:
        transaction = item.message_id.partition(".")[0]
        try:
            outcome = await self._asked(http, transaction, item.outcome)
            if outcome != item.outcome:
                return _row(item, HELD, f"the database says {outcome} by now: make a new plan")
            await self._post(http, f"transactions/{transaction}/{outcome}", {})
        except CheckUnavailable as error:
            return _row(item, HELD, str(error))
        except NotifyError as error:
            return _row(item, error.status, str(error))
        return _row(item, 200, "")

    async def _asked(self, http: HttpClient, transaction: str, planned: str) -> str:
        """The outcome that the half's database tells. Raises CheckUnavailable if that database was not given."""
        raw = await http.call("GET", f"/v1/admin/transactions/{transaction}", b"", CALL_SECONDS, JSON)
        half: dict[str, Any] = msgspec.json.decode(raw)
        decided = {"COMMITTED": "commit", "ROLLED_BACK": "rollback"}.get(half["state"])
        if decided is not None:  # decided since the audit; recording it again changes nothing
            return decided
        for database in self._inputs.databases:
            if database.source_id() == half["source"]:
                if self._dry_run:  # asking the database may insert a tombstone
                    return planned
                asked = HalfMessage(
                    id=transaction, producer_group=half["producer_group"], source=half["source"],
                    shard=half["shard"], attempt=half["unknown_answers"], messages=[],
                )  # fmt: skip
                return "commit" if _answer(database, asked) is Outcome.COMMIT else "rollback"
        raise CheckUnavailable(
            f"the half came from source {half['source'] or '(none)'}, and no given database is that source"
        )

    # --- messages ---------------------------------------------------------------------------------------------

    async def _republish(self, http: HttpClient, items: Sequence[Item], now: Now) -> list[Row]:
        now_us = time.time_ns() // 1000

        def make(items: Sequence[Item]) -> dict[str, Any]:
            rows = [{"id": i.message_id} | _content(i, now.rows[i.message_id][0], now_us) for i in items]
            return {"messages": rows}

        return await self._all(http, items, "messages/republish", make)

    async def _redeliver(self, http: HttpClient, items: Sequence[Item]) -> list[Row]:
        path = f"groups/{quote(items[0].group, safe='')}/redeliver"
        return await self._all(
            http, items, path, lambda items: {"ids": [i.message_id for i in items], "force": self._force}
        )

    async def _all(
        self, http: HttpClient, items: Sequence[Item], path: str, make: Callable[[Sequence[Item]], dict[str, Any]]
    ) -> list[Row]:
        """The rows of items that a request carries out; `make` makes its body."""
        body = make(items)
        try:
            answered = await self._post(http, path, body)
        except NotifyError as error:
            if isinstance(error, ForeignAnswer) and error.is_for_size and len(items) > 1:  # too large for a proxy
                middle = len(items) // 2
                halves = [await self._all(http, half, path, make) for half in (items[:middle], items[middle:])]
                return [row for half in halves for row in half]
            return [_row(item, error.status, str(error)) for item in items]
        return [
            _row(item, each.get("status", 200), each.get("detail", ""), each.get("as", ""))
            for item, each in zip(items, answered["result"]["items"], strict=True)
        ]

    async def _post(self, http: HttpClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body | {"reason": self._reason, "dry_run": self._dry_run}).encode()
        raw = await http.call("POST", f"/v1/admin/{path}", data, CALL_SECONDS, JSON)
        reply: dict[str, Any] = msgspec.json.decode(raw)
        return reply


def _content(item: Item, row: LocalRow, now_us: int) -> dict[str, Any]:
    """A message for the server; without a topic where the server's half has the rest."""
    if row.message:
        return row.at(now_us)
    due_us = int(item.evidence.get("due_us") or 0)
    return {"deliver_at": instant(due_us)} if due_us > now_us else {}


def _row(item: Item, status: int, detail: str, again: str = "") -> Row:
    known = {"key": item.key, "finding": item.finding, "message_id": item.message_id, "what": item.what}
    known |= {"action": item.action, "group": item.group}
    return known | {"status": status, "detail": detail, "as": again or item.again, "was_before": False}


def _alike(items: Sequence[Item]) -> list[list[Item]]:
    """Items of one action and group, in requests of a bounded size."""
    by_kind: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        by_kind.setdefault((item.action, item.group), []).append(item)
    return [
        part
        for (action, _), several in by_kind.items()
        for part in parts(several, DECIDED_AT_ONCE if action == "decide" else AT_ONCE)
    ]


def _answer(database: Database, half: HalfMessage) -> Outcome:
    with database.connect() as connection:
        outcome = answer(connection, half)
        connection.commit()
        return outcome
