"""Mending what an audit found, through the server's admin routes: each step may be repeated, and each is recorded.

* IN_DOUBT: the database is asked as a check would ask, and its answer recorded. Where it has no row a tombstone is
  inserted, so that the transaction can no longer commit behind the audit's back.
* LOST and CONFLICT, where the database committed: the message is published again, from the local row where that has a
  body (outbox), else from the half that the server has.
* ACKED_NO_EFFECT: the message is sent again to the group whose inbox lacks it, and to no other.

The rest needs a person: what was delivered and should not have been cannot be called back.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from notify.check import HalfMessage, Outcome
from notify.check.listener import CheckUnavailable
from notify.check.local import answer
from notify.client.http import HttpClient
from notify.errors import NotifyError
from notify.spark.databases import Database
from notify.spark.result import Found, Inputs
from notify.wire import JSON

AT_ONCE = 500
CALL_SECONDS = 60.0


class Repair:
    """Carries out the repairs of findings. `dry_run`: says what it would do, and does nothing."""

    def __init__(self, inputs: Inputs, url: str, reason: str, *, dry_run: bool = False) -> None:
        self._inputs = inputs
        self._url = url
        self._reason = reason
        self._dry_run = dry_run
        self._done: list[dict[str, Any]] = []

    async def run(self, found: Iterable[Found]) -> list[dict[str, Any]]:
        """One row a repair: finding, message_id, what, status (HTTP's; 0: not tried), detail."""
        http = HttpClient(self._url)
        try:
            lost: list[Found] = []
            effectless: dict[str, list[Found]] = defaultdict(list)
            for f in found:
                if f.evidence.get("repaired"):
                    continue
                if f.finding == "IN_DOUBT" and f.message_no == 0:
                    await self._decide(http, f)
                elif f.finding in ("LOST", "CONFLICT"):
                    if f.evidence.get("local") == "COMMITTED":
                        lost.append(f)
                    else:
                        self._note(f, "undo the effects by hand", 0, "the database rolled it back and it was delivered")
                elif f.finding == "ACKED_NO_EFFECT":
                    for group in f.groups:
                        effectless[group].append(f)
            for part in _parts(lost):
                await self._republish(http, part)
            for group, several in effectless.items():
                for part in _parts(several):
                    await self._redeliver(http, group, part)
        finally:
            http.close()
        return self._done

    async def _decide(self, http: HttpClient, f: Found) -> None:
        outcome = "check"
        try:
            outcome = await self._asked(http, f)
            await self._post(http, f"transactions/{f.transaction_id}/{outcome}", {})
            self._note(f, outcome, 200, "")
        except CheckUnavailable as error:
            self._note(f, "check", 0, str(error))
        except NotifyError as error:
            self._note(f, outcome, error.status, str(error))

    async def _asked(self, http: HttpClient, f: Found) -> str:
        """The outcome by the database whose half it is. Raises CheckUnavailable where none of those given is it."""
        raw = await http.call("GET", f"/v1/admin/transactions/{f.transaction_id}", b"", CALL_SECONDS, JSON)
        half: dict[str, Any] = msgspec.json.decode(raw)
        decided = {"COMMITTED": "commit", "ROLLED_BACK": "rollback"}.get(half["state"])
        if decided is not None:  # meanwhile; saying it again changes nothing
            return decided
        if self._dry_run:  # asking would settle it
            return "commit" if f.evidence.get("local") == "COMMITTED" else "rollback"
        for database in self._inputs.databases:
            if database.source_id() == half["source"]:
                asked = HalfMessage(
                    id=f.transaction_id, producer_group=half["producer_group"], source=half["source"],
                    shard=half["shard"], attempt=half["checks_answered"], messages=[],
                )  # fmt: skip
                outcome = _answer(database, asked)
                return "commit" if outcome is Outcome.COMMIT else "rollback"
        raise CheckUnavailable(f"no database given is source {half['source'] or '(none)'}, which the half came from")

    async def _republish(self, http: HttpClient, part: Sequence[Found]) -> None:
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for database in self._inputs.databases:
            names = sorted({f.transaction_id for f in part if f.database in ("", database.name)})
            rows |= {(r["transaction_id"], r["message_no"]): r for r in database.rows_of(names)}
        messages = []
        for f in part:
            row: dict[str, Any] | None = rows.get((f.transaction_id, f.message_no))
            messages.append({"id": f.message_id} | _message_of(row))
        await self._all(http, part, "messages/republish", {"messages": messages}, "published again")

    async def _redeliver(self, http: HttpClient, group: str, part: Sequence[Found]) -> None:
        body = {"ids": [f.message_id for f in part]}
        await self._all(http, part, f"groups/{quote(group, safe='')}/redeliver", body, f"sent to {group} again")

    async def _all(self, http: HttpClient, part: Sequence[Found], path: str, body: dict[str, Any], what: str) -> None:
        try:
            answered = await self._post(http, path, body)
        except NotifyError as error:
            for f in part:
                self._note(f, what, error.status, str(error))
            return
        for f, item in zip(part, answered["result"]["items"], strict=True):
            self._note(f, what, item.get("status", 200), item.get("detail", ""), item.get("as", ""))

    async def _post(self, http: HttpClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body | {"reason": self._reason, "dry_run": self._dry_run}).encode()
        found: dict[str, Any] = msgspec.json.decode(
            await http.call("POST", f"/v1/admin/{path}", data, CALL_SECONDS, JSON)
        )
        return found

    def _note(self, f: Found, what: str, status: int, detail: str, again: str = "") -> None:
        self._done.append(
            {"finding": f.finding, "message_id": f.message_id, "what": what, "status": status, "detail": detail,
             "as": again, "dry_run": self._dry_run}
        )  # fmt: skip


def _answer(database: Database, half: HalfMessage) -> Outcome:
    with database.connect() as connection:
        outcome = answer(connection, half)
        connection.commit()
        return outcome


def _message_of(row: dict[str, Any] | None) -> dict[str, Any]:
    """The message of a local row: nothing where the server has the body."""
    if row is None or row["body"] is None:
        return {}
    fields = {
        "topic": row["topic"],
        "body_base64": base64.b64encode(row["body"]).decode(),
        "key": row["key"],
        "tag": row["tag"],
        "headers": json.loads(row["headers"]) if row["headers"] else None,
        "ttl": row["ttl"],
    }
    return {name: value for name, value in fields.items() if value is not None}


def _parts(found: Sequence[Found]) -> Iterable[Sequence[Found]]:
    for at in range(0, len(found), AT_ONCE):
        yield found[at : at + AT_ONCE]
