"""The form of each write. It shows a preview before the write is carried out."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import ASGIApp

from notify.admin_api.declaration import AdminWrite, Input
from notify.admin_api.description import Description
from notify.admin_api.groups import class_inputs
from notify.admin_api.words import setting
from notify.admin_api.writes import FORMS, described
from notify.errors import InvalidRequest, NotFound, NotifyError, TooLarge, Unavailable
from notify.runtime.threads import in_thread
from notify.server.console.api import Api, path_of, status_of
from notify.server.console.responses import failed, page

FORM_FIELDS = 5000
MOST_ONCE = 100
"""The most forms whose answers are kept, for browsers that send them again."""
LARGE_FORM_BYTES = 64 << 10
"""Larger forms are decoded in a thread: a megabyte of escapes takes 0.2 s."""


def form_of(body: bytes, most: int = FORM_FIELDS) -> dict[str, str]:
    """The fields of a posted form; commas join the values of a repeated name. Raises TooLarge for more than `most`.

    `parse_qs` took half a second for a megabyte of escapes between other characters.
    """
    if body.count(b"&") >= most:
        raise TooLarge(f"a form has at most {most} fields")
    fields: dict[str, list[str]] = {}
    for pair in body.split(b"&"):
        name, _, value = pair.partition(b"=")
        if value:
            fields.setdefault(_unquoted(name), []).append(_unquoted(value))
    return {name: ",".join(values) for name, values in fields.items()}


def _unquoted(text: bytes) -> str:
    return unquote_to_bytes(text.replace(b"+", b" ")).decode("utf-8", "replace")


class Once:
    """Carries out a form once, although a browser sends it again: after a double click, or to reload the result."""

    def __init__(self) -> None:
        self._answers: dict[bytes, asyncio.Future[dict[str, Any]]] = {}

    async def do(self, sent: bytes, act: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[dict[str, Any], bool]:
        """(the answer of `act`, whether it is that of an earlier call with the same `sent`). `sent`: a hash of who sent
        a form, of its preview's number and of its fields; empty if it has no number. One that was refused is carried
        out when it is sent again."""
        if not sent:
            return await act(), False
        earlier = self._answers.get(sent)
        if earlier is not None:
            return await asyncio.shield(earlier), True
        answered = self._answers[sent] = asyncio.get_running_loop().create_future()
        if len(self._answers) > MOST_ONCE:
            del self._answers[next(iter(self._answers))]
        try:
            answer = await act()
        except BaseException as error:
            self._answers.pop(sent, None)
            answered.set_exception(
                error if isinstance(error, NotifyError) else Unavailable("the write was interrupted")
            )
            answered.exception()  # nobody else may be waiting
            raise
        answered.set_result({name: value for name, value in answer.items() if name != "token"})
        return answer, False


def add_routes(routes: APIRouter, api: ASGIApp) -> None:
    """Add the routes that show each write's form and carry the write out; `api` serves the admin routes."""
    once = Once()

    @routes.get("/do/{name}", response_model=None)
    async def form(request: Request, name: str) -> Response:
        admin = Api(api, request)
        try:
            fields = form_of(request.scope["query_string"])
            change = await _change(admin, name, fields)
        except NotifyError as error:
            return failed(request, error)
        effect = await _effect(admin, name, change, fields)
        return await _form_page(admin, request, name, change, fields, effect=effect)

    @routes.post("/do/{name}", response_model=None)
    async def carry_out(request: Request, name: str) -> Response:
        try:
            body = await request.body()
            fields = form_of(body) if len(body) < LARGE_FORM_BYTES else await in_thread(form_of, body)
        except NotifyError as error:
            return failed(request, error)
        admin = Api(api, request)
        is_preview = fields.pop("step", "preview") != "do"
        try:
            change = await _change(admin, name, fields)
        except NotifyError as error:
            return failed(request, error)
        targets = {target: fields.get(target, "") for target in change.targets}
        number = fields.pop("once", "")
        content = repr((request.state.principal.name, number, name, sorted(fields.items()))).encode()
        sent = hashlib.sha256(content).digest() if number else b""

        async def act() -> dict[str, Any]:
            return await _carried_out(admin, change, targets, fields, is_preview)

        try:
            answer, is_repeated = (await act(), False) if is_preview else await once.do(sent, act)
        except NotifyError as error:
            return await _form_page(admin, request, name, change, fields, refused=error)
        if is_preview:
            return await _form_page(admin, request, name, change, fields, preview=answer)
        result = answer["result"] if isinstance(answer["result"], dict) else {}
        job = result.get("job")
        back = _page_after(change, targets)
        if job is not None:
            back = f"/jobs/{job}" if len(result.get("jobs", ())) < 2 else "/jobs"
        outcome = described(name, answer["target"], answer["result"])
        status = await status_of(admin)
        return page(
            "done.html", request, title=change.title, answer=answer, told=outcome, back=back, status=status,
            is_repeated=is_repeated,
        )  # fmt: skip


def _page_after(change: AdminWrite, targets: dict[str, str]) -> str:
    """The page to continue with after a write, or after it was cancelled: a list if not all targets are known."""
    if all(targets.values()):
        return change.back.format(**{name: quote(value, safe="") for name, value in targets.items()})
    return change.back.partition("{")[0].partition("?")[0].rstrip("/") or "/"


async def _carried_out(
    api: Api, change: AdminWrite, targets: dict[str, str], fields: dict[str, str], is_preview: bool
) -> dict[str, Any]:
    """The admin route's answer. Raises InvalidRequest for a missing field, Refused."""
    missing = [name for name, value in targets.items() if not value]
    if missing:
        raise InvalidRequest(f"{', '.join(missing)} is missing")
    body = change.sent(fields) | {"reason": fields.get("reason", ""), "dry_run": is_preview}
    return await api.call(change.method, f"/v1/admin/{change.path_to(*targets.values())}", body)


async def _effect(api: Api, name: str, change: AdminWrite, fields: dict[str, str]) -> Description | None:
    """The effect of a write, if its form is opened with all that the write needs but a reason; else None."""
    targets = {target: fields.get(target, "") for target in change.targets}
    if not all(fields.get(field.name) for field in change.inputs if field.required):
        return None
    try:
        answer = await _carried_out(api, change, targets, fields | {"reason": "to show the effect"}, is_preview=True)
    except NotifyError:
        return None  # the preview says what is wrong
    return described(name, answer["target"], answer["result"])


async def _change(api: Api, name: str, fields: dict[str, str]) -> AdminWrite:
    """The write of this name, with inputs that fit its setting, group or message. Raises NotFound."""
    change = FORMS.get(name)
    if change is None:
        raise NotFound(f"there is no write {name[:60]!r}")
    if name == "priorities.put":
        return await _priorities(api, change, fields)
    if name in ("message.send", "dead-letters.edit"):
        await _fill_in_content(api, fields, fields.pop("like", "") or fields.get("id", ""))
        return change
    if name == "message.replace":
        await _fill_in_content(api, fields, fields.get("message", ""))
        return change
    if name == "schedule.put":
        await _fill_in_schedule(api, change, fields)
    if name != "settings.put":
        return change
    settings = (await api.get("settings"))["settings"]
    wanted = fields.get("setting", "")
    row = next((row for row in settings if row["name"] == wanted and row["live"]), None)
    if row is None:
        raise NotFound(f"there is no setting {wanted[:60]!r} that may change while servers run")
    if "reason" not in fields:  # the form is opened, not posted
        fields.setdefault(wanted, "" if row["value"] == "" else setting(row["value"]))
    choices = ("true", "false") if row["type"] == "bool" else ()
    bound = f" From {row['low']:g} to {row['high']:g}." if row["low"] is not None else ""
    kind = "choice" if choices else "number" if row["type"] in ("int", "float") else "exact"
    field = Input(wanted, row["doc"] + bound, kind, choices, kind != "exact", wanted)
    return dataclasses.replace(change, title=f"Change {wanted}", chosen=(field,))


async def _fill_in_content(api: Api, fields: dict[str, str], like: str) -> None:
    """Fill a form with the content of the message `like`, unless the form was posted."""
    if not like or "body" in fields:
        return
    message = (await api.get(path_of("messages/{id}", id=like)))["message"]
    headers = {name: text for name, text in (message.get("headers") or {}).items() if not name.startswith("notify-")}
    fields["body"] = message.get("body", "")
    fields |= {field: message[field] for field in ("key", "tag") if field in message}
    fields["headers"] = "\n".join(f"{name}={text}" for name, text in headers.items())


async def _fill_in_schedule(api: Api, change: AdminWrite, fields: dict[str, str]) -> None:
    """Fill a form with a schedule as it is now, unless the form was posted or is for a new one."""
    if not fields.get("schedule") or "topic" in fields:
        return
    schedule = await api.get(path_of("schedules/{name}", name=fields["schedule"]))
    for field in change.inputs:
        value = schedule.get(field.name)
        if isinstance(value, dict):
            value = "\n".join(f"{name}={text}" for name, text in value.items())
        if value is not None:
            fields[field.name] = f"{value:g}" if isinstance(value, float) else str(value)


async def _priorities(api: Api, change: AdminWrite, fields: dict[str, str]) -> AdminWrite:
    """A form with one class more than the group has; unless it was posted, `fields` gets the group's classes."""
    posted = [int(field[6:]) for field in fields if re.fullmatch(r"class_\d{1,2}", field)]
    if not posted and fields.get("group"):
        current = await api.get(path_of("groups/{name}/priorities", name=fields["group"]))
        for number, row in enumerate(current["classes"], 1):
            fields |= {f"class_{number}": row["name"], f"weight_{number}": str(row["weight"])}
            fields[f"topics_{number}"] = ", ".join(row["topics"])
            posted.append(number)
        fields["shares"] = "\n".join(f"{topic}={turns}" for topic, turns in current["shares"].items())
        return dataclasses.replace(change, chosen=class_inputs(max(3, len(posted) + 1)))
    return dataclasses.replace(change, chosen=class_inputs(max([3, *posted])))


async def _form_page(
    api: Api,
    request: Request,
    name: str,
    change: AdminWrite,
    fields: dict[str, str],
    preview: dict[str, Any] | None = None,
    refused: NotifyError | None = None,
    effect: Description | None = None,
) -> Response:
    targets = {target: fields.get(target, "") for target in change.targets}
    code = 200 if refused is None else refused.status
    return page(
        "change.html", request, code, title=change.title, name=name, change=change, given=fields, targets=targets,
        preview=preview, refused=refused, effect=effect, back=_page_after(change, targets), status=await status_of(api),
        told=None if preview is None else described(name, preview["target"], preview["result"]),
        once=secrets.token_hex(8),
    )  # fmt: skip
