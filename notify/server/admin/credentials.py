"""Admin routes of credentials: principals, their rights, and when they expire."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from notify.admin_api.declaration import Write
from notify.admin_api.server import CredentialWrite
from notify.errors import InvalidRequest, NotFound
from notify.protocol.limits import check_name
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread
from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.access.rights import parse_rights
from notify.server.admin.writes import Desk, Who

LAST_ADMIN = "no other credential has the right admin: make another one with that right before you revoke this one"


def _shown(credential: Credential, now_us: int) -> dict[str, Any]:
    return {
        "id": credential.id,
        "name": credential.name,
        "kind": credential.kind,
        "subject": credential.proof if credential.kind != "token" else None,
        "rights": list(credential.rights),
        "requests": credential.requests,
        "polls": credential.polls,
        "created_at": instant(credential.created_us),
        "expires_at": instant(credential.expires_us) if credential.expires_us else None,
        "used_at": instant(credential.used_us) if credential.used_us else None,
        "state": "revoked" if credential.revoked_us else "valid" if credential.holds(now_us) else "expired",
    }


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `credentials`."""

    async def recorded() -> list[Credential]:
        return await in_thread(desk.running.administration.records.credentials)

    @routes.get("/credentials")
    async def credentials(all: bool = False) -> dict[str, Any]:
        """List the credentials; `all` includes expired and revoked ones. Only hashes of tokens are kept."""
        now_us = desk.running.core.clock()
        rows = [_shown(c, now_us) for c in await recorded() if all or c.holds(now_us)]
        return {"access": "on" if desk.running.administration.access.on else "off", "credentials": rows}

    @routes.post("/credentials")
    async def add(write: CredentialWrite, who: Who) -> dict[str, Any]:
        """Add a credential. Only this answer has its token, which cannot be shown again."""
        check_name("name", write.name)
        rights = tuple(str(right) for right in parse_rights(write.rights))
        if (write.kind == "token") != (write.subject is None):
            raise InvalidRequest(
                "kinds certificate and subject need the field subject; a token takes none", "invalid_schema"
            )
        number, now_us = tokens.new_id(), desk.running.core.clock()
        token, proof = tokens.new_token(number) if write.subject is None else (None, write.subject)
        if write.subject is not None:
            for c in await recorded():
                if (c.kind, c.proof) == (write.kind, write.subject) and c.holds(now_us):
                    raise InvalidRequest(f"credential {c.id} is for that {c.kind} already: revoke it first", "in_use")
        expires_us = now_us + round(write.expires_in * 1e6)
        new = Credential(number, write.name, write.kind, proof, rights, write.requests, write.polls, now_us, expires_us)
        preview = _shown(new, now_us) | {"id": None if write.dry_run else number}

        async def do() -> Any:
            await in_thread(desk.running.administration.records.add_credential, new)
            await desk.running.administration.look()
            return preview

        answer = await desk.carry_out(write, who, "credential.add", write.name, do, preview)
        return answer if write.dry_run or token is None else answer | {"token": token}

    @routes.post("/credentials/{number}/revoke")
    async def revoke(number: Annotated[str, Field(max_length=16)], write: Write, who: Who) -> dict[str, Any]:
        """Revoke a credential: immediately at this server, within a second at the others."""
        rows, now_us = await recorded(), desk.running.core.clock()
        credential = next((c for c in rows if c.id == number), None)
        if credential is None:
            raise NotFound(f"there is no credential {number!r}")
        other_admins = [c for c in rows if c.id != number and c.holds(now_us) and "admin" in c.rights]
        if "admin" in credential.rights and credential.holds(now_us) and not other_admins:
            raise InvalidRequest(LAST_ADMIN, "last_admin")
        revoked = dataclasses.replace(credential, revoked_us=credential.revoked_us or now_us)

        async def do() -> Any:
            await in_thread(desk.running.administration.records.revoke_credential, number, now_us)
            await desk.running.administration.look()
            return _shown(revoked, now_us)

        return await desk.carry_out(write, who, "credential.revoke", credential.name, do, _shown(revoked, now_us))
