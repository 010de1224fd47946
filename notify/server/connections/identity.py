"""Finds the sender of a request by its token, or by its connection's certificate."""

from __future__ import annotations

from typing import Any

from notify.errors import NotifyError, Unavailable
from notify.server.access.gate import Access
from notify.server.access.guard import NOT_RUNNING, shown_by
from notify.server.access.principal import EVERYONE, NOBODY, UNVERIFIED, Principal
from notify.server.data.answer import fault_of
from notify.server.data.request import Request


def admit(access: Access | None, request: Request, certificate: str | None) -> NotifyError | None:
    """Set the request's principal before its body is read, if access is on; UNVERIFIED if that takes a while.

    Returns the error if the sender is refused.
    """
    if access is None or not access.on or request.principal is NOBODY:
        return None
    for name, value in request.headers:
        if name == b"authorization":
            request.authorization = value
    try:
        request.principal = access.admit(request.authorization, certificate) or UNVERIFIED
    except NotifyError as error:
        return without_frames(error)
    return None


def recognised(access: Access | None, headers: list[tuple[bytes, bytes]], certificate: str | None) -> Principal | None:
    """Who sends a request for another route than a data route, if that is known without waiting; else None."""
    if access is None:
        return None
    return access.recognised(shown_by(headers), certificate) if access.on else EVERYONE


async def verify(access: Access | None, request: Request, certificate: str | None) -> NotifyError | None:
    """Set the principal that `admit` left UNVERIFIED. Returns the error if the sender is refused."""
    if access is None:
        return Unavailable(NOT_RUNNING)
    try:
        request.principal = await access.verify(request.authorization, certificate)
    except NotifyError as error:
        return without_frames(error)
    except Exception:
        return fault_of("verification_failed", request.method, request.path)
    return None


def without_frames(error: NotifyError) -> NotifyError:
    """The error without its traceback, to be kept instead of raised.

    The traceback's frames refer to the object that keeps the error, and to the request: this circle would stay in
    memory until a full collection, which is rare.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def common_name(certificate: Any) -> str | None:
    """The common name in a client's verified certificate, in the form of Python's ssl; None if there is none."""
    for names in (certificate or {}).get("subject", ()):
        for name, value in names:
            if name == "commonName":
                return str(value)
    return None
