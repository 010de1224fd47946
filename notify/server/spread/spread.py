"""Admin requests that name no worker: passed on to the workers that they concern, whose answers become one answer.

A request under a worker's own address, such as `/worker-2/v1/admin/topics`, is that worker's alone. The worker that
passes a request on shows the others the token that came with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notify.errors import Forbidden, InvalidRequest, NotFound, NotifyError, Unavailable
from notify.keys import shard_of_key
from notify.server import problems
from notify.server.cluster.workers import Workers
from notify.server.data.answer import fault_of
from notify.server.jobs.dead_letters import REDRIVEN
from notify.server.running import Running
from notify.server.spread import exposition, publishing
from notify.server.spread.combining import Answer
from notify.server.spread.rules import Asked, Rule, job_of, refuse_offsets, renumbered, rule_of
from notify.server.spread.shares import shares
from notify.settings import Settings

ADMIN = "/v1/admin/"
METRICS = "/metrics"
READ_SECONDS, WRITE_SECONDS = 10.0, 60.0
METRICS_SECONDS = 4.0
"""A worker that hangs must not cost a monitor the others' metrics: Prometheus waits for 10 s."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A request as it is asked of each worker."""

    scope: Scope
    method: str
    path: str
    body: bytes
    head: str
    """Lines of the head that say who asks."""

    @property
    def query(self) -> Mapping[str, str]:
        return _query(self.scope)

    @property
    def fields(self) -> dict[str, Any]:
        """The body, where it is a JSON object; else empty: the route says what is wrong with it."""
        try:
            read = json.loads(self.body)
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}


Told = tuple[int, bytes]
"""Status and body of a worker's answer."""


class Spread:
    """An ASGI application in front of the routes that FastAPI serves; it answers what concerns several workers."""

    def __init__(self, api: ASGIApp, running: Callable[[], Running | None]) -> None:
        """`running` gives None before the start."""
        self._api = api
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = self._running() if scope["type"] == "http" else None
        if running is None or running.workers is None or not _is_spread(scope):
            await self._api(scope, receive, send)
            return
        try:
            question = _Question(scope, scope["method"], scope["path"], await _read(receive), _head(scope))
            response = await _Spreading(self._api, running, running.workers, question).answer()
        except NotifyError as error:
            response = problems.refused(scope, error)
        except Exception:
            response = problems.refused(scope, fault_of("request_failed", scope["method"], scope["path"]))
        await response(scope, receive, send)


class _Spreading:
    """One request on its way to the workers."""

    def __init__(self, api: ASGIApp, running: Running, workers: Workers, question: _Question) -> None:
        self._api = api
        self._settings: Settings = running.core.settings
        self._names = self._settings.key_shards
        self._workers = workers
        self._question = question

    async def answer(self) -> Response:
        question = self._question
        if question.path == METRICS:
            return await self._metrics()
        path = question.path.removeprefix(ADMIN)
        rule = rule_of(question.method, path, question.query)
        refuse_offsets(path, question.fields)
        if rule.asked is Asked.NONE:
            raise InvalidRequest(
                "a backup is of one worker's log: ask each worker at its own address, as GET /v1/members has it",
                "names_no_worker",
            )
        if rule.asked is Asked.KNOWING:
            return await self._of_who_knows()
        if rule.asked is Asked.OF_KEY:
            return await self._of_key(path)
        if rule.asked is Asked.JOB:
            return await self._job(path)
        if rule.asked is Asked.OF_EACH:
            return await self._of_each(rule)
        if rule.asked is Asked.UP_TO:
            return await self._up_to(rule)
        return await self._of_all(rule)

    # --- asking -----------------------------------------------------------------------------------------------

    async def _of_key(self, path: str) -> Response:
        """The answer of the worker of the message's key; without a key, that of the first worker that has the topic.

        A topic that its first message made is at that message's worker alone: here it is made at the key's worker, too.
        """
        question = self._question
        key = question.fields.get("key")
        if not isinstance(key, str):
            return await self._of_who_knows()
        number = self._names.index(shard_of_key(key, self._names))
        told = await self._ask(number)
        if told[0] == 404:
            topic = ADMIN + path.removesuffix("/messages")
            others = [n for n in range(len(self._names)) if n != number]
            statuses = [(await self._ask(n, method="GET", path=topic, body=b""))[0] for n in others]
            made = json.dumps({"reason": question.fields.get("reason", "")}).encode()
            if 200 in statuses and (await self._ask(number, method="PUT", path=topic, body=made))[0] == 200:
                told = await self._ask(number)
        return _response(told)

    async def _ask(
        self, number: int, *, method: str = "", path: str = "", body: bytes | None = None, query: str | None = None
    ) -> Told:
        """A worker's answer; `method` and so on: others than the request's. Raises Unavailable, Forbidden."""
        question = self._question
        method = method or question.method
        path = path or question.path
        body = question.body if body is None else body
        query = question.scope["query_string"].decode("latin-1") if query is None else query
        if number == self._workers.number:
            return await _asked_here(self._api, {**question.scope, "method": method}, path, query, body)
        raw = question.scope.get("raw_path", question.path.encode()) if path == question.path else path.encode()
        target = raw.decode("latin-1") + ("?" + query if query else "")
        seconds = READ_SECONDS if method == "GET" else WRITE_SECONDS
        if path == METRICS:
            seconds = METRICS_SECONDS
        name = self._names[number]
        if name in self._workers.silent:
            raise Unavailable(
                f"{name} does not answer: it hangs. Its parent starts it again after worker_timeout_seconds; try "
                "again, or ask the others alone"
            )
        try:
            status, answer = await self._workers.ask(
                self._settings, number, method, target, body, seconds, question.head
            )
        except Unavailable as error:
            raise Unavailable(f"{name} does not answer ({error}); try again, or ask the others alone") from None
        if status == 401:
            raise Forbidden(
                f"{name} does not know who asks: workers ask each other with the token of the request, and a client "
                "certificate is not passed on. Show a token, or ask each worker at its own address"
            )
        return status, answer

    async def _of_who_knows(self) -> Response:
        """The first answer other than 404."""
        away: Unavailable | None = None
        unknown: Told | None = None
        for number in self._nearest_first():
            try:
                told = await self._ask(number)
            except Unavailable as error:
                away = error
                continue
            if told[0] != 404:
                return _response(told)
            unknown = told
        if away is not None or unknown is None:
            raise away or NotFound("no worker knows it")
        return _response(unknown)

    async def _of_each(self, rule: Rule) -> Response:
        """Messages that are published again: each is looked for at all workers, and published by one."""
        question = self._question
        fields = question.fields
        answers = await self._all(rule, json.dumps(fields | {"dry_run": True}).encode())
        refused = _refusal(list(answers.values()))
        if refused is not None:
            return _response(refused)
        told = [json.loads(answers[number][1]) for number in range(len(self._names))]
        rows = [answer["result"]["items"] for answer in told]
        chosen = publishing.chosen(fields["messages"], rows, self._names)
        items = [rows[number][place] for place, number in enumerate(chosen)]
        if not fields.get("dry_run"):
            for number, places in publishing.by_worker(chosen, items).items():
                some = fields | {"messages": [fields["messages"][place] for place in places]}
                status, body = await self._ask(number, body=json.dumps(some).encode())
                if status != 200:
                    return _response((status, body))
                told[0] = json.loads(body)
                for place, item in zip(places, told[0]["result"]["items"], strict=True):
                    items[place] = item
        return JSONResponse(told[0] | {"result": {"items": items}})

    async def _up_to(self, rule: Rule) -> Response:
        """A write about at most `max` rows of all workers together: each is asked for its share by ids."""
        fields = self._question.fields
        if fields.get("ids") is not None or fields.get("all"):
            return await self._of_all(rule)
        trial = await self._all(rule, json.dumps(fields | {"dry_run": True}).encode())
        refused = _refusal(list(trial.values()))
        if refused is not None:
            return _response(refused)
        told: dict[int, Answer] = {n: json.loads(body) for n, (status, body) in trial.items() if status == 200}
        own = [answer["result"]["ids"] for answer in told.values()]
        parts = dict(zip(told, shares(own, int(fields.get("max", REDRIVEN))), strict=True))
        for number, ids in parts.items():
            told[number]["result"]["ids"] = ids
        if not fields.get("dry_run"):
            asked = [n for n, ids in parts.items() if ids] or list(parts)[:1]  # none has any: one says so
            bodies = [json.dumps(fields | {"ids": parts[n]}).encode() for n in asked]
            answers = await asyncio.gather(*(self._ask(n, body=b) for n, b in zip(asked, bodies, strict=True)))
            refused = _refusal(answers)
            if refused is not None:
                return _response(refused)
            told = {n: json.loads(body) for n, (status, body) in zip(asked, answers, strict=True) if status == 200}
        return JSONResponse(rule.combine([self._names[n] for n in told], list(told.values()), self._question.query))

    def _nearest_first(self) -> Sequence[int]:
        own = self._workers.number
        return [own, *(n for n in range(len(self._names)) if n != own)]

    async def _job(self, path: str) -> Response:
        """The job of the worker that its number names."""
        noun, number, *rest = path.split("/")
        if not (number.isascii() and number.isdigit() and len(number) < 18):
            return _response(await self._ask(self._workers.number))
        worker, own = job_of(int(number))
        if not 0 <= worker < len(self._names):
            raise NotFound(f"there is no job {number}")
        status, body = await self._ask(worker, path=ADMIN + "/".join((noun, str(own), *rest)))
        return _response((status, renumbered(worker, body)))

    async def _of_all(self, rule: Rule) -> Response:
        """The answers of all workers as one. A write goes to all as a dry run first: where one refuses, none does it.

        A read is answered without a worker that is away, which `missing` names.
        """
        question = self._question
        is_read = question.method == "GET"
        if not (is_read or question.fields.get("dry_run")):
            trial = json.dumps(question.fields | {"dry_run": True}).encode()
            refused = _refusal(list((await self._all(rule, trial)).values()))
            if refused is not None:
                return _response(refused)
        answers = await self._all(rule, None, without_away=is_read)
        refused = _refusal(list(answers.values()))
        if refused is not None:
            return _response(refused)
        told = {n: renumbered(n, body) for n, (status, body) in answers.items() if status == 200}
        read: list[Answer] = [json.loads(body) for body in told.values()]
        whole = rule.combine([self._names[number] for number in told], read, question.query)
        asked = [number for number, name in enumerate(self._names) if rule.query(name, question.query) is not None]
        missing = [self._names[number] for number in asked if number not in answers]
        if missing:
            whole["missing"] = missing
        result = whole.get("result")
        if isinstance(result, dict) and "job" in result:
            result["jobs"] = [answer["result"]["job"] for answer in read]
        return JSONResponse(whole)

    async def _all(self, rule: Rule, body: bytes | None, *, without_away: bool = False) -> dict[int, Told]:
        """The answers by the workers' numbers; `without_away`: of those that answer, if any. Raises Unavailable."""
        queries = {number: rule.query(name, self._question.query) for number, name in enumerate(self._names)}
        asked = {n: self._ask(n, body=body, query=urlencode(q)) for n, q in queries.items() if q is not None}
        answers: dict[int, Told] = {}
        told_by = await asyncio.gather(*asked.values(), return_exceptions=True)
        for number, told in zip(asked, told_by, strict=True):
            if isinstance(told, Unavailable) and without_away:
                continue
            if isinstance(told, BaseException):
                raise told
            answers[number] = told
        if asked and not answers:
            raise Unavailable("no worker answers; try again")
        return answers

    async def _metrics(self) -> Response:
        """Each worker's metrics, with its name as a label."""
        answers = await asyncio.gather(*map(self._ask, range(len(self._names))), return_exceptions=True)
        texts: dict[str, str] = {}
        for name, told in zip(self._names, answers, strict=True):
            if isinstance(told, Unavailable):
                continue  # a monitor sees that its samples are missing
            if isinstance(told, BaseException):
                raise told
            if told[0] != 200:
                return Response(told[1], told[0])
            texts[name] = told[1].decode()
        return PlainTextResponse(exposition.joined(texts), media_type="text/plain; version=0.0.4; charset=utf-8")


def _is_spread(scope: Scope) -> bool:
    """Whether a request is for others than the worker that has it."""
    path = scope["path"]
    if scope.get("notify.alone") or not (path.startswith(ADMIN) or path == METRICS):
        return False
    rule = rule_of(scope["method"], path.removeprefix(ADMIN), _query(scope))
    return path == METRICS or rule.asked is not Asked.HERE


def _query(scope: Scope) -> Mapping[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def _refusal(answers: Sequence[Told]) -> Told | None:
    """The answer that refuses, if one does; a worker that does not know the name counts only where none does."""
    refusals = [told for told in answers if told[0] != 200]
    others = [told for told in refusals if told[0] != 404]
    if others:
        return others[0]
    return refusals[0] if refusals and len(refusals) == len(answers) else None


def _response(told: Told) -> Response:
    status, body = told
    return Response(body, status, media_type="application/json" if status == 200 else "application/problem+json")


def _head(scope: Scope) -> str:
    """Lines of the head that say who asks: the token that came with the request, and a name where access is off."""
    headers = dict(scope["headers"])
    shown = scope.get("state", {}).get("shown", b"")
    lines = {"authorization": shown, "x-notify-user": headers.get(b"x-notify-user", b"")}
    return "".join(f"{name}: {value.decode('latin-1')}\r\n" for name, value in lines.items() if value)


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _asked_here(api: ASGIApp, scope: Scope, path: str, query: str, body: bytes) -> Told:
    """This worker's own answer."""
    sent: list[Message] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return given.pop() if given else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    own = {
        **scope,
        "path": path,
        "query_string": query.encode(),
        "headers": headers,
        "state": dict(scope.get("state", {})),
    }
    if path != scope["path"]:
        own["raw_path"] = path.encode()
    try:
        await api(own, receive, send)
    except Exception:
        if not sent:
            raise  # else it is raised once more behind the answer that says so
    return int(sent[0]["status"]), b"".join(message.get("body", b"") for message in sent[1:])
