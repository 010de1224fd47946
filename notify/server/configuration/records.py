"""Records that all servers of a registry share: actions, settings by revision, credentials. Called from threads."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.errors import Conflict, NotFound
from notify.server.access.credential import Credential
from notify.server.configuration.revisions import Revision
from notify.storage.sql.administration import (
    changing,
    server_action,
    server_audit,
    server_change,
    server_credential,
    server_revision,
)

SETTINGS, CREDENTIALS = "settings", "credentials"
"""Names in `server_change`."""

REPORTS = 100
"""The number of audit reports that are kept."""


class Records:
    """Reads and writes of the records, each in its own transaction; a write is durable when it returns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- who did what -----------------------------------------------------------------------------------------

    def record(self, at_us: int, who: str, what: str, target: str, reason: str, result: Any) -> int:
        """Record an action; its number."""
        values = {"at_us": at_us, "who": who[:255], "what": what, "target": target[:255], "reason": reason}
        with self._engine.begin() as connection:
            inserted = connection.execute(server_action.insert().values(result=json.dumps(result), **values))
        assert inserted.inserted_primary_key is not None
        return int(inserted.inserted_primary_key[0])

    def complete(self, number: int, result: Any) -> None:
        """Record the result of an action."""
        columns = server_action.c
        with self._engine.begin() as connection:
            connection.execute(server_action.update().where(columns.id == number).values(result=json.dumps(result)))

    def take_back(self, number: int) -> None:
        """Remove the record of an action that was refused, and so changed nothing."""
        with self._engine.begin() as connection:
            connection.execute(server_action.delete().where(server_action.c.id == number))

    def actions(
        self, limit: int, before: int | None = None, what: str = "", target: str = "", exact_target: str = ""
    ) -> list[dict[str, Any]]:
        """The newest actions with numbers below `before`; `what` and `target` are prefixes."""
        columns = server_action.c
        query = sa.select(server_action).order_by(columns.id.desc()).limit(limit)
        if before is not None:
            query = query.where(columns.id < before)
        if what:
            query = query.where(columns.what.startswith(what, autoescape=True))
        if target:
            query = query.where(columns.target.startswith(target, autoescape=True))
        if exact_target:
            query = query.where(columns.target == exact_target)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    # --- settings ---------------------------------------------------------------------------------------------

    def revision(self, number: int | None = None) -> Revision:
        """The revision of this number, or the newest revision. Raises NotFound."""
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
        """Revisions of the settings, the newest first."""
        query = sa.select(server_revision).order_by(server_revision.c.number.desc()).limit(limit)
        with self._engine.connect() as connection:
            return [_revision(row) for row in connection.execute(query).mappings()]

    def add_revision(self, at_us: int, who: str, reason: str, settings: dict[str, Any], after: int) -> Revision:
        """Add the revision that follows number `after`. Raises Conflict if another one was added in the meantime."""
        revision = Revision(after + 1, at_us, who[:255], reason, settings)
        values = {"number": revision.number, "at_us": at_us, "who": revision.who, "reason": reason}
        try:
            with changing(self._engine, SETTINGS) as connection:
                connection.execute(server_revision.insert().values(settings=json.dumps(settings), **values))
        except sa.exc.IntegrityError:
            raise Conflict("the settings were changed by someone else just now: look, and try again") from None
        return revision

    # --- credentials ------------------------------------------------------------------------------------------

    def credentials(self) -> list[Credential]:
        """All credentials by name, including expired and revoked ones."""
        columns = server_credential.c
        with self._engine.connect() as connection:
            rows = connection.execute(
                sa.select(server_credential).order_by(columns.name, columns.created_us)
            ).mappings()
            return [Credential(**(dict(row) | {"rights": tuple(json.loads(row["rights"]))})) for row in rows]

    def add_credential(self, credential: Credential) -> None:
        with changing(self._engine, CREDENTIALS) as connection:
            connection.execute(server_credential.insert().values(_columns(credential)))

    def add_first_credential(self, credential: Credential) -> None:
        """Add a credential if there is none yet. If several servers call this at the same time, only one adds it."""
        with changing(self._engine, CREDENTIALS) as connection:
            if connection.scalar(sa.select(sa.func.count()).select_from(server_credential)) == 0:
                connection.execute(server_credential.insert().values(_columns(credential)))

    def revoke_credential(self, number: str, at_us: int) -> None:
        """Record that a credential is revoked, unless it was revoked before."""
        columns = server_credential.c
        with changing(self._engine, CREDENTIALS) as connection:
            connection.execute(
                server_credential.update().where(columns.id == number, columns.revoked_us == 0).values(revoked_us=at_us)
            )

    def note_used(self, used_us: dict[str, int]) -> None:
        """Record when credentials were last used (microseconds since 1970, by id)."""
        columns = server_credential.c
        with self._engine.begin() as connection:
            for number, at_us in used_us.items():
                connection.execute(
                    server_credential.update()
                    .where(columns.id == number, columns.used_us < at_us)
                    .values(used_us=at_us)
                )

    # --- audits -----------------------------------------------------------------------------------------------

    def add_audit(self, at_us: int, fields: dict[str, Any], report: str) -> int:
        """Store an audit's verdict and report, and delete the oldest reports; its number."""
        values = {"at_us": at_us, "verdict": fields["verdict"], "found": json.dumps(fields), "report": report}
        with self._engine.begin() as connection:
            audit_id = connection.execute(server_audit.insert().values(values)).inserted_primary_key
            assert audit_id is not None
            old = server_audit.update().where(server_audit.c.id <= audit_id[0] - REPORTS, server_audit.c.report != "")
            connection.execute(old.values(report=""))
        return int(audit_id[0])

    def audits(self, limit: int) -> list[dict[str, Any]]:
        """Audits without their reports, the newest first."""
        columns = server_audit.c
        has_report = (columns.report != "").label("has_report")
        query = sa.select(columns.id, columns.at_us, columns.found, has_report).order_by(columns.id.desc()).limit(limit)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            {"id": row.id, "at_us": row.at_us, "has_report": bool(row.has_report)} | json.loads(row.found)
            for row in rows
        ]

    def audit_report(self, number: int) -> str:
        """An audit's report, empty if there is none."""
        with self._engine.connect() as connection:
            page = connection.scalar(sa.select(server_audit.c.report).where(server_audit.c.id == number))
        return str(page or "")

    # --- changes ----------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """How often settings, credentials and schedules have changed, by name."""
        with self._engine.connect() as connection:
            return {row.name: row.version for row in connection.execute(sa.select(server_change))}


def _revision(row: Any) -> Revision:
    return Revision(row["number"], row["at_us"], row["who"], row["reason"], json.loads(row["settings"]))


def _columns(credential: Credential) -> dict[str, Any]:
    fields = {f: getattr(credential, f) for f in Credential.__slots__}
    return fields | {"rights": json.dumps(credential.rights)}
