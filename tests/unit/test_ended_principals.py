"""A principal ends with its credential, also where only a waiting request still has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from notify.runtime.clock import wall_clock
from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.access.gate import Access
from notify.server.settings import Settings
from tests.support.issuer import Provider


async def nothing() -> None:
    """Stands for a look into the database, which knows no more credentials."""


def made(kind: str, proof: str, number: str = "", **fields: Any) -> Credential:
    return Credential(number or tokens.new_id(), "a", kind, proof, ("view",), 0, 0, wall_clock(), 0, **fields)


async def test_a_providers_subject_ends_with_its_credential() -> None:
    """Whoever showed a provider's token continued to receive with the rights of the subject's revoked credential."""
    access = Access(Settings(access=True), nothing, provider=Provider())  # type: ignore[arg-type]
    clerk = made("subject", "clerk")
    access.learn([clerk])
    principal = await access.principal(b"Bearer clerk:publish", None)
    other = await access.principal(b"Bearer other:publish", None)
    ended: list[str] = []
    with principal.waiting(lambda: ended.append("clerk")), other.waiting(lambda: ended.append("other")):
        access.learn([clerk, made("certificate", "another")])
        assert not ended and principal.may("view")
        access.learn([dataclasses.replace(clerk, revoked_us=1)])
        assert ended == ["clerk"] and not principal.may("view") and other.may("publish")
    access.close()


async def test_a_principal_from_before_other_quotas_ends_with_its_credential() -> None:
    access = Access(Settings(access=True), nothing)
    credential = made("certificate", "service")
    access.learn([credential])
    principal = await access.principal(b"", "service")
    ended: list[str] = []
    with principal.waiting(lambda: ended.append("service")):
        access.configure(dataclasses.replace(access.settings, principal_polls=7))
        access.learn([dataclasses.replace(credential, revoked_us=1)])
        assert ended == ["service"] and not principal.may("view")
    access.close()


async def test_a_principal_ends_when_its_token_or_its_credential_expires() -> None:
    access = Access(Settings(access=True), nothing, provider=Provider())  # type: ignore[arg-type]
    soon = wall_clock() + 3_600_000_000
    access.learn([dataclasses.replace(made("subject", "clerk"), expires_us=soon), made("certificate", "service")])
    assert (await access.principal(b"Bearer other:publish", None)).expires_us == 4_000_000_000_000_000
    assert (await access.principal(b"Bearer clerk:publish", None)).expires_us == soon
    assert (await access.principal(b"", "service")).expires_us == 0
    access.close()
