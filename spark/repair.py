"""Repairs of an audit's findings, through the server's admin routes. Each may be repeated, and each is recorded.

* IN_DOUBT: asks the database as a check does, and records its answer. If the database has no row, a tombstone is
  inserted, so that the transaction can no longer commit.
* LOST and CONFLICT, if the database committed: publishes the message again, from the local row if that has a body
  (outbox), otherwise from the server's half.
* ACKED_NO_EFFECT: sends the message again, only to the group whose inbox lacks it.

Other findings need a person: a message that should not have been delivered cannot be called back.
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
    """Repairs findings. With `dry_run` it changes nothing, and reports what it would do."""

    def __init__(self, inputs: Inputs, url: str, reason: str, *, dry_run: bool = False) -> None:
        self._inputs = inputs
        self._url = url
        self._reason = reason
        self._dry_run = dry_run
        self._done: list[dict[str, Any]] = []

    async def run(self, cases: Iterable[Found]) -> list[dict[str, Any]]:
        """One row for each repair: finding, message_id, what, status (of HTTP; 0: not tried), detail."""
        http = HttpClient(self._url)
        try:
            lost: list[Found] = []
            effectless: dict[str, list[Found]] = defaultdict(list)
            for f in cases:
                if f.evidence.get("repaired"):
                    continue
                if f.finding == "IN_DOUBT" and f.message_no == 0:
                    await self._decide(http, f)
                elif f.finding in ("LOST", "CONFLICT"):
                    if f.evidence.get("local") == "COMMITTED":
                        lost.append(f)
                    else:
                        self._note(
                            f,
                            "undo the effects by hand",
                            0,
                            "the message was delivered, and the database had rolled its transaction back",
                        )
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
        """The outcome that the half's database tells. Raises CheckUnavailable if that database was not given."""
        raw = await http.call("GET", f"/v1/admin/transactions/{f.transaction_id}", b"", CALL_SECONDS, JSON)
        half: dict[str, Any] = msgspec.json.decode(raw)
        decided = {"COMMITTED": "commit", "ROLLED_BACK": "rollback"}.get(half["state"])
        if decided is not None:  # decided since the audit; recording it again changes nothing
            return decided
        if self._dry_run:  # asking the database may insert a tombstone
            return "commit" if f.evidence.get("local") == "COMMITTED" else "rollback"
        for database in self._inputs.databases:
            if database.source_id() == half["source"]:
                asked = HalfMessage(
                    id=f.transaction_id, producer_group=half["producer_group"], source=half["source"],
                    shard=half["shard"], attempt=half["checks_answered"], messages=[],
                )  # fmt: skip
                outcome = _answer(database, asked)
                return "commit" if outcome is Outcome.COMMIT else "rollback"
        raise CheckUnavailable(
            f"the half came from source {half['source'] or '(none)'}, and no given database is that source"
        )

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

    async def _all(self, http: HttpClient, part: Sequence[Found], path: str, body: dict[str, Any], action: str) -> None:
        try:
            answered = await self._post(http, path, body)
        except NotifyError as error:
            for f in part:
                self._note(f, action, error.status, str(error))
            return
        for f, item in zip(part, answered["result"]["items"], strict=True):
            self._note(f, action, item.get("status", 200), item.get("detail", ""), item.get("as", ""))

    async def _post(self, http: HttpClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body | {"reason": self._reason, "dry_run": self._dry_run}).encode()
        reply: dict[str, Any] = msgspec.json.decode(
            await http.call("POST", f"/v1/admin/{path}", data, CALL_SECONDS, JSON)
        )
        return reply

    def _note(self, f: Found, action: str, status: int, detail: str, again: str = "") -> None:
        self._done.append(
            {"finding": f.finding, "message_id": f.message_id, "what": action, "status": status, "detail": detail,
             "as": again, "dry_run": self._dry_run}
        )  # fmt: skip


def _answer(database: Database, half: HalfMessage) -> Outcome:
    with database.connect() as connection:
        outcome = answer(connection, half)
        connection.commit()
        return outcome


def _message_of(row: dict[str, Any] | None) -> dict[str, Any]:
    """The message of a local row; empty if only the server has the body."""
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


def _parts(cases: Sequence[Found]) -> Iterable[Sequence[Found]]:
    for at in range(0, len(cases), AT_ONCE):
        yield cases[at : at + AT_ONCE]
