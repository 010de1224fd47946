"""Records that all servers of a registry share: actions, settings by revision, credentials. Called from threads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.errors import Conflict, NotFound
from notify.server.access.credential import Credential
from notify.server.configuration.revisions import Revision
from notify.storage.sql.administration import (
    server_action,
    server_audit,
    server_change,
    server_credential,
    server_revision,
)

SETTINGS, CREDENTIALS = "settings", "credentials"
"""Names in `server_change`."""

REPORTS = 100
"""Pages of audits that are kept."""


class Records:
    """Reads and writes, each in a transaction of its own; durable when a write returns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- who did what -----------------------------------------------------------------------------------------

    def record(self, at_us: int, who: str, what: str, target: str, reason: str, result: Any) -> int:
        """Add one action; its number."""
        values = {"at_us": at_us, "who": who[:255], "what": what, "target": target[:255], "reason": reason}
        with self._engine.begin() as connection:
            made = connection.execute(server_action.insert().values(result=json.dumps(result), **values))
        assert made.inserted_primary_key is not None
        return int(made.inserted_primary_key[0])

    def complete(self, number: int, result: Any) -> None:
        """Note what became of an action."""
        c = server_action.c
        with self._engine.begin() as connection:
            connection.execute(server_action.update().where(c.id == number).values(result=json.dumps(result)))

    def take_back(self, number: int) -> None:
        """Remove an action that was refused: nothing was changed."""
        with self._engine.begin() as connection:
            connection.execute(server_action.delete().where(server_action.c.id == number))

    def actions(self, limit: int, before: int | None = None, what: str = "", target: str = "") -> list[dict[str, Any]]:
        """The newest actions, those numbered below `before`; `what` and `target` begin with these."""
        c = server_action.c
        query = sa.select(server_action).order_by(c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(c.id < before)
        if what:
            query = query.where(c.what.startswith(what, autoescape=True))
        if target:
            query = query.where(c.target.startswith(target, autoescape=True))
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    # --- settings ---------------------------------------------------------------------------------------------

    def revision(self, number: int | None = None) -> Revision:
        """One revision, or the newest. Raises NotFound."""
        query = sa.select(server_revision).order_by(server_revision.c.number.desc()).limit(1)
        if number is not None:
            query = query.where(server_revision.c.number == number)
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is not None:
            return _revision(row)
        if number:
            raise NotFound(f"there is no revision {number} of the settings")
        return Revision()

    def revisions(self, limit: int) -> list[Revision]:
        """The newest first."""
        query = sa.select(server_revision).order_by(server_revision.c.number.desc()).limit(limit)
        with self._engine.connect() as connection:
            return [_revision(row) for row in connection.execute(query).mappings()]

    def add_revision(self, at_us: int, who: str, reason: str, settings: dict[str, Any], after: int) -> Revision:
        """The revision that follows number `after`. Raises Conflict where another was made meanwhile."""
        made = Revision(after + 1, at_us, who[:255], reason, settings)
        values = {"number": made.number, "at_us": at_us, "who": made.who, "reason": reason}
        try:
            with self._change(SETTINGS) as connection:
                connection.execute(server_revision.insert().values(settings=json.dumps(settings), **values))
        except sa.exc.IntegrityError:
            raise Conflict("the settings were changed by someone else just now: look, and try again") from None
        return made

    # --- credentials ------------------------------------------------------------------------------------------

    def credentials(self) -> list[Credential]:
        """All, also those that hold no more, by name."""
        c = server_credential.c
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(server_credential).order_by(c.name, c.created_us)).mappings()
            return [Credential(**(dict(row) | {"rights": tuple(json.loads(row["rights"]))})) for row in rows]

    def add_credential(self, credential: Credential) -> None:
        with self._change(CREDENTIALS) as connection:
            connection.execute(server_credential.insert().values(_columns(credential)))

    def add_first_credential(self, credential: Credential) -> None:
        """Add it if there is none: of several servers that do so at once, one does."""
        with self._change(CREDENTIALS) as connection:
            if connection.scalar(sa.select(sa.func.count()).select_from(server_credential)) == 0:
                connection.execute(server_credential.insert().values(_columns(credential)))

    def revoke_credential(self, number: str, at_us: int) -> None:
        """Let nobody in with it any more."""
        c = server_credential.c
        with self._change(CREDENTIALS) as connection:
            connection.execute(
                server_credential.update().where(c.id == number, c.revoked_us == 0).values(revoked_us=at_us)
            )

    def note_used(self, used_us: dict[str, int]) -> None:
        """When credentials were last used, by id."""
        c = server_credential.c
        with self._engine.begin() as connection:
            for number, at_us in used_us.items():
                connection.execute(
                    server_credential.update().where(c.id == number, c.used_us < at_us).values(used_us=at_us)
                )

    # --- audits -----------------------------------------------------------------------------------------------

    def add_audit(self, at_us: int, found: dict[str, Any], report: str) -> int:
        """Keep a verdict and its page; the pages of the oldest go. Its number."""
        values = {"at_us": at_us, "verdict": found["verdict"], "found": json.dumps(found), "report": report}
        with self._engine.begin() as connection:
            made = connection.execute(server_audit.insert().values(values)).inserted_primary_key
            assert made is not None
            old = server_audit.update().where(server_audit.c.id <= made[0] - REPORTS, server_audit.c.report != "")
            connection.execute(old.values(report=""))
        return int(made[0])

    def audits(self, limit: int) -> list[dict[str, Any]]:
        """The newest first, without their pages."""
        c = server_audit.c
        has_report = (c.report != "").label("has_report")
        query = sa.select(c.id, c.at_us, c.found, has_report).order_by(c.id.desc()).limit(limit)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            {"id": row.id, "at_us": row.at_us, "has_report": bool(row.has_report)} | json.loads(row.found)
            for row in rows
        ]

    def audit_report(self, number: int) -> str:
        """An audit's page, "" for none."""
        with self._engine.connect() as connection:
            page = connection.scalar(sa.select(server_audit.c.report).where(server_audit.c.id == number))
        return str(page or "")

    # --- changes ----------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """How often what changed."""
        with self._engine.connect() as connection:
            return {row.name: row.version for row in connection.execute(sa.select(server_change))}

    @contextlib.contextmanager
    def _change(self, name: str) -> Iterator[Connection]:
        """A transaction that counts as a change. Of two servers' one waits for the other, and sees what that wrote."""
        c = server_change.c
        # The row to lock is made in a transaction of its own: InnoDB ends as a deadlock what several insert and then
        # update.
        with contextlib.suppress(sa.exc.IntegrityError), self._engine.begin() as connection:
            if connection.scalar(sa.select(c.version).where(c.name == name)) is None:
                connection.execute(server_change.insert().values(name=name, version=0))
        with self._engine.begin() as connection:
            connection.execute(server_change.update().where(c.name == name).values(version=c.version + 1))
            yield connection


def _revision(row: Any) -> Revision:
    return Revision(row["number"], row["at_us"], row["who"], row["reason"], json.loads(row["settings"]))


def _columns(credential: Credential) -> dict[str, Any]:
    fields = {f: getattr(credential, f) for f in Credential.__slots__}
    return fields | {"rights": json.dumps(credential.rights)}
