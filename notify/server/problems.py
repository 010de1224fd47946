"""Turns errors into FastAPI's answers: a problem document (RFC 9457), or a page if a browser asks for one."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from notify.errors import DiskFull, InvalidRequest, NotifyError, Unavailable
from notify.protocol.wire import PROBLEM
from notify.runtime import faults
from notify.runtime.urls import text_of_missing
from notify.server.console.responses import failed
from notify.server.core.flow import retry_after
from notify.server.data.answer import fault_of, problem


def refused(scope: Any, error: NotifyError) -> Response:
    """The answer to a request that the guard refuses."""
    return failed(Request(scope), error) if _wants_page(scope) else _problem(error)


def _wants_page(scope: Any) -> bool:
    """Whether a browser asks for a page of the console."""
    accept = dict(scope["headers"]).get(b"accept", b"")
    return b"text/html" in accept and not scope["path"].startswith(("/v1/", "/metrics", "/openapi.json"))


def _problem(error: NotifyError) -> Response:
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(math.ceil(seconds))}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(problem(error), error.status, headers, PROBLEM)


def _explanation(error: Mapping[str, Any]) -> str:
    """A sentence for one of pydantic's errors; for a pattern or a time it says what to write."""
    if error["type"].startswith(("datetime_", "timezone_")):
        return "it should be an instant, such as 2026-01-31T12:00:00Z"
    pattern = error.get("ctx", {}).get("pattern", "") if error["type"] == "string_pattern_mismatch" else ""
    if (words := re.fullmatch(r"\^\(([A-Za-z_|]+)\)\$", pattern)) is not None:
        return f"it should be one of {', '.join(words[1].split('|'))}"
    return str(error["msg"])


def _sqlite_code(error: Exception) -> int | None:
    """The primary result code of SQLite's error; None for an error of another database."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def answer_errors(api: FastAPI) -> None:
    """Have `api` answer each error that a route raises."""

    @api.exception_handler(NotifyError)
    async def known(_: Request, error: NotifyError) -> Response:
        return _problem(error)

    @api.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client has disconnected, and does not read it

    async def away(request: Request, error: Exception) -> Response:
        faults.note("records_away", error, method=request.method, path=request.scope["path"][:200])
        told: NotifyError = Unavailable("the database of the server's records does not answer; try again")
        if _sqlite_code(error) == sqlite3.SQLITE_FULL:
            told = DiskFull("the disk is full, so this write cannot be recorded; reads continue")
        elif _sqlite_code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY):
            told = Unavailable(
                f"the file of the server's records cannot be used ({getattr(error, 'orig', error)}): look whether its "
                "disk has room for another file (df -i), and at the server's limit of open files"
            )
        return refused(request.scope, told)

    for kind in faults.DATABASE_AWAY:
        api.exception_handler(kind)(away)

    @api.exception_handler(sa.exc.DataError)
    async def not_storable(request: Request, error: sa.exc.DataError) -> Response:
        return _problem(InvalidRequest(f"the database refuses a text of this request: {error.orig}", "invalid_schema"))

    @api.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return refused(request.scope, fault_of("request_failed", request.method, request.scope["path"]))

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        # FastAPI's frame refers to the error, and its traceback to the frame: this circle would keep the body in memory
        # until a full collection.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        where = ".".join(str(part) for part in first["loc"])
        invalid_request = InvalidRequest(f"{where}: {_explanation(first)}", "invalid_schema")
        return Response(problem(invalid_request), 422, media_type=PROBLEM)

    @api.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        error.__traceback__ = error.__cause__ = error.__context__ = None  # as above
        codes = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large"}
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = text_of_missing(request.method, request.scope["path"])
        return refused(
            request.scope, InvalidRequest(detail, codes.get(error.status_code, "invalid"), error.status_code)
        )
