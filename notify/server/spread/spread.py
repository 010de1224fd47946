"""Passes admin requests that name no worker on to the workers concerned, and combines the workers' answers.

A request under a worker's own address, such as `/worker-2/v1/admin/topics`, is answered by that worker alone. The
worker that passes a request on sends the request's token with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notify.admin_api.dead_letters import REDRIVEN
from notify.admin_api.declaration import FanOut
from notify.errors import Forbidden, InvalidRequest, NotFound, NotifyError, Unavailable
from notify.protocol.keys import shard_of_key
from notify.protocol.limits import digits
from notify.server import problems
from notify.server.access.principal import Principal
from notify.server.cluster.workers import Workers
from notify.server.data.answer import fault_of
from notify.server.exposition import PLAIN
from notify.server.json_body import body_of
from notify.server.running import Running
from notify.server.settings import Settings
from notify.server.spread import cursors
from notify.server.spread.combining import Answer
from notify.server.spread.rules import Rule, job_of, refuse_offsets, renumbered, rule_of

ADMIN = "/v1/admin/"
METRICS = "/metrics"
_READS = ("GET", "HEAD", "OPTIONS")
READ_SECONDS, WRITE_SECONDS = 10.0, 60.0
METRICS_SECONDS = 4.0
"""A hanging worker must not keep the other workers' metrics from a monitor: Prometheus waits for 10 s."""
STATUS = ADMIN + "status"
STATUS_SECONDS = 1.0
"""Each page of the console asks for it, for its menu."""
Reply = tuple[int, bytes]
"""Status and body."""
_UNKNOWN = 404
"""The status of a message without a topic if the worker has no half of it."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A request that is passed on to workers."""

    scope: Scope
    method: str
    path: str
    body: bytes
    head: str
    """Header lines with the caller's token or name."""
    fields: dict[str, Any]
    """The body of a write, a JSON object; empty for a read."""

    @property
    def query(self) -> Mapping[str, str]:
        return _query(self.scope)


class Spread:
    """An ASGI application in front of FastAPI's routes; it answers requests that concern several workers."""

    def __init__(self, api: ASGIApp, running: Callable[[], Running | None]) -> None:
        """`running` returns None before the start."""
        self._api = api
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = self._running() if scope["type"] == "http" else None
        if running is None or running.workers is None or not _is_spread(scope):
            await self._api(scope, receive, send)
            return
        try:
            _check_some_right(scope)
            body = await _read(receive)
            fields = _fields(scope, body)
            if fields is None:
                await self._api(scope, _given(body), send)
                return
            question = _Question(scope, scope["method"], scope["path"], body, _head(scope), fields)
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
        if rule.asked is FanOut.NONE:
            raise InvalidRequest(
                f"this is about the log of one worker: ask each worker at its own address, such as …/{self._names[0]} "
                "(`notify node list` shows them)",
                "names_no_worker",
            )
        if rule.asked is FanOut.KNOWING:
            return await self._by_first_that_knows()
        if rule.asked is FanOut.OF_KEY:
            return await self._by_key(path)
        if rule.asked is FanOut.JOB:
            return await self._job(path)
        if rule.asked is FanOut.OF_EACH:
            return await self._each_by_one(rule)
        if rule.asked is FanOut.UP_TO:
            return await self._up_to(rule)
        return await self._by_all(rule)

    # --- asking -----------------------------------------------------------------------------------------------

    async def _by_key(self, path: str) -> Response:
        """The answer of the worker of the message's key; without a key, of the first worker that has the topic.

        A topic that was made by its first message exists only at that message's worker. So it is made at the key's
        worker here if another worker has it.
        """
        question = self._question
        key = question.fields.get("key")
        principal: Principal = question.scope["state"]["principal"]
        principal.check("admin", path.split("/")[1])  # before work on the key, and on the topic at other workers
        if not isinstance(key, str):
            return await self._by_first_that_knows()
        number = self._names.index(shard_of_key(key, self._names))
        reply = await self._ask(number)
        if reply[0] == 404:
            topic = ADMIN + path.removesuffix("/messages")
            other_numbers = [n for n in range(len(self._names)) if n != number]
            statuses = [(await self._ask(n, method="GET", path=topic, body=b""))[0] for n in other_numbers]
            new_topic = json.dumps({"reason": question.fields.get("reason", "")}).encode()
            if 200 in statuses and (await self._ask(number, method="PUT", path=topic, body=new_topic))[0] == 200:
                reply = await self._ask(number)
        return _response_of(reply)

    async def _ask(
        self, number: int, *, method: str = "", path: str = "", body: bytes | None = None, query: str | None = None
    ) -> Reply:
        """A worker's answer; `method`, `path`, `body` and `query` replace those of the request.

        Raises Unavailable, Forbidden.
        """
        question = self._question
        method = method or question.method
        path = path or question.path
        body = question.body if body is None else body
        query = question.scope["query_string"].decode("latin-1") if query is None else query
        if number == self._workers.number:
            return await _asked_here(self._api, {**question.scope, "method": method}, path, query, body)
        raw = question.scope.get("raw_path", question.path.encode()) if path == question.path else quote(path).encode()
        target = raw.decode("latin-1") + ("?" + query if query else "")
        seconds = READ_SECONDS if method == "GET" else WRITE_SECONDS
        if path == METRICS:
            seconds = METRICS_SECONDS
        elif path == STATUS:
            seconds = STATUS_SECONDS
        name = self._names[number]
        if name in self._workers.silent:
            raise Unavailable(
                f"{name} does not answer, because it hangs. Its parent starts it again after worker_timeout_seconds; "
                "try again, or ask only the other workers"
            )
        try:
            status, answer = await self._workers.ask(
                self._settings, number, method, target, body, seconds, question.head
            )
        except Unavailable as error:
            raise Unavailable(f"{name} does not answer ({error}); try again, or ask only the other workers") from None
        if status == 401:
            raise Forbidden(
                f"{name} does not know the caller: workers pass the token of a request on to each other, but not a "
                "client certificate. Show a token, or ask each worker at its own address"
            )
        return status, answer

    async def _by_first_that_knows(self) -> Response:
        """The first answer other than 404."""
        away: Unavailable | None = None
        not_found: Reply | None = None
        for number in self._nearest_first():
            try:
                reply = await self._ask(number)
            except Unavailable as error:
                away = error
                continue
            if reply[0] != 404:
                return _response_of(reply)
            not_found = reply
        if away is not None or not_found is None:
            raise away or NotFound("no worker knows it")
        return _response_of(not_found)

    async def _each_by_one(self, rule: Rule) -> Response:
        """Publish messages again: all workers look for each message, and one worker publishes it."""
        question = self._question
        fields = question.fields
        answers = await self._all(rule, json.dumps(fields | {"dry_run": True}).encode())
        refused = _refusal(list(answers.values()))
        if refused is not None:
            return _response_of(refused)
        previews = [json.loads(answers[number][1]) for number in range(len(self._names))]
        answer = previews[0]
        rows = [preview["result"]["items"] for preview in previews]
        chosen = _chosen(fields["messages"], rows, self._names)
        items = [rows[number][index] for index, number in enumerate(chosen)]
        if not fields.get("dry_run"):
            for number, indexes in _by_worker(chosen, items).items():
                part = fields | {"messages": [fields["messages"][index] for index in indexes]}
                status, body = await self._ask(number, body=json.dumps(part).encode())
                if status != 200:
                    return _response_of((status, body))
                answer = json.loads(body)
                for index, item in zip(indexes, answer["result"]["items"], strict=True):
                    items[index] = item
        return JSONResponse(answer | {"result": {"items": items}})

    async def _up_to(self, rule: Rule) -> Response:
        """Carry out a write of at most `max` rows of all workers together: each worker gets the ids of its share."""
        fields = self._question.fields
        if fields.get("ids") is not None or fields.get("all"):
            return await self._by_all(rule)
        places = cursors.offsets(fields.get("offset", 0), self._names)
        parts = {name: {"offset": offset, "dry_run": True} for name, offset in places.items()}
        trial = await self._parts(parts)
        refused = _refusal(list(trial.values()))
        if refused is not None:
            return _response_of(refused)
        answers: dict[str, Answer] = {name: json.loads(body) for name, (status, body) in trial.items() if status == 200}
        next_offset = cursors.allot(answers, fields.get("max", REDRIVEN), places, self._names)
        if not fields.get("dry_run"):
            ids = {name: answer["result"]["ids"] for name, answer in answers.items()}
            names = [name for name in ids if ids[name]] or list(ids)[:1]  # without ids, one worker answers
            replies = await self._parts({name: {"ids": ids[name], "offset": 0} for name in names})
            refused = _refusal(list(replies.values()))
            if refused is not None:
                return _response_of(refused)
            answers = {name: json.loads(body) for name, (status, body) in replies.items() if status == 200}
        whole = rule.combine(list(answers), list(answers.values()), self._question.query)
        whole["result"]["next_offset"] = next_offset
        return JSONResponse(whole)

    async def _parts(self, parts: Mapping[str, dict[str, Any]]) -> dict[str, Reply]:
        """The answers of these workers, each to the request with its own fields. Raises Unavailable."""
        fields = self._question.fields
        calls = [self._ask(self._names.index(n), body=json.dumps(fields | part).encode()) for n, part in parts.items()]
        return dict(zip(parts, await asyncio.gather(*calls), strict=True))

    def _nearest_first(self) -> Sequence[int]:
        this = self._workers.number
        return [this, *(n for n in range(len(self._names)) if n != this)]

    async def _job(self, path: str) -> Response:
        """The answer about a job from the worker in the job's number."""
        noun, text, *rest = path.split("/")
        number = digits(text, 17)
        if number is None:
            return _response_of(await self._ask(self._workers.number))
        worker, worker_number = job_of(number)
        if not 0 <= worker < len(self._names):
            raise NotFound(f"there is no job {number}")
        status, body = await self._ask(worker, path=ADMIN + "/".join((noun, str(worker_number), *rest)))
        return _response_of((status, renumbered(worker, body)))

    async def _by_all(self, rule: Rule) -> Response:
        """One answer from all workers. A write is sent as a dry run first: if a worker refuses it, no worker does it.

        A read is answered without workers that are unreachable; `missing` names them.
        """
        question = self._question
        is_read = question.method == "GET"
        if not (is_read or question.fields.get("dry_run")):
            trial = json.dumps(question.fields | {"dry_run": True}).encode()
            refused = _refusal(list((await self._all(rule, trial)).values()))
            if refused is not None:
                return _response_of(refused)
        answers = await self._all(rule, None, without_away=is_read)
        refused = _refusal(list(answers.values()))
        if refused is not None:
            return _response_of(refused)
        bodies = {n: renumbered(n, body) for n, (status, body) in answers.items() if status == 200}
        decoded: list[Answer] = [json.loads(body) for body in bodies.values()]
        whole = rule.combine([self._names[number] for number in bodies], decoded, question.query)
        numbers = [number for number, name in enumerate(self._names) if rule.query(name, question.query) is not None]
        missing = [self._names[number] for number in numbers if number not in answers]
        if missing:
            whole["missing"] = missing
        result = whole.get("result")
        if isinstance(result, dict) and "job" in result:
            result["jobs"] = [answer["result"]["job"] for answer in decoded]
        return JSONResponse(whole)

    async def _all(self, rule: Rule, body: bytes | None, *, without_away: bool = False) -> dict[int, Reply]:
        """The answers by worker number; `without_away` leaves out workers that do not answer. Raises Unavailable."""
        queries = {number: rule.query(name, self._question.query) for number, name in enumerate(self._names)}
        calls = {n: self._ask(n, body=body, query=urlencode(q)) for n, q in queries.items() if q is not None}
        answers: dict[int, Reply] = {}
        replies = await asyncio.gather(*calls.values(), return_exceptions=True)
        for number, reply in zip(calls, replies, strict=True):
            if isinstance(reply, Unavailable) and without_away:
                continue
            if isinstance(reply, BaseException):
                raise reply
            answers[number] = reply
        if calls and not answers:
            raise Unavailable("no worker answers; try again")
        return answers

    async def _metrics(self) -> Response:
        """Each worker's metrics, with its name as a label; in the plain format, which has no exemplars."""
        replies = await asyncio.gather(*map(self._ask, range(len(self._names))), return_exceptions=True)
        texts: dict[str, str] = {}
        for name, reply in zip(self._names, replies, strict=True):
            if isinstance(reply, Unavailable):
                continue  # a monitor notices the missing samples
            if isinstance(reply, BaseException):
                raise reply
            if reply[0] != 200:
                return Response(reply[1], reply[0])
            texts[name] = reply[1].decode()
        return PlainTextResponse(joined(texts), media_type=PLAIN)


def _is_spread(scope: Scope) -> bool:
    """Whether a request concerns other workers than this one."""
    path = scope["path"]
    if scope.get("notify.names_worker") or not (path.startswith(ADMIN) or path == METRICS):
        return False
    rule = rule_of(scope["method"], path.removeprefix(ADMIN), _query(scope))
    return path == METRICS or rule.asked is not FanOut.HERE


def _query(scope: Scope) -> Mapping[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def _head(scope: Scope) -> str:
    """Header lines with the caller: the request's token, and its name (used while access is off)."""
    headers = dict(scope["headers"])
    authorization = scope.get("state", {}).get("shown", b"")
    lines = {"authorization": authorization, "x-notify-user": headers.get(b"x-notify-user", b"")}
    return "".join(f"{name}: {value.decode('latin-1')}\r\n" for name, value in lines.items() if value)


def _check_some_right(scope: Scope) -> None:
    """Raises Forbidden for a write of a caller with no right to any, before its body is read; the workers look closer.

    A consumer may change its group's subscriptions.
    """
    principal: Principal = scope["state"]["principal"]
    if scope["method"] not in _READS and not principal.may_some("consume"):
        principal.check_some("admin")


def _fields(scope: Scope, body: bytes) -> dict[str, Any] | None:
    """The body of a write. None if it is not a JSON object, or its `dry_run`, which is replaced here, is not a boolean:
    this worker alone then says what is wrong, as a server without workers does."""
    if scope["method"] in _READS:
        return {}
    try:
        fields = body_of(dict(scope["headers"]), body)
    except InvalidRequest:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("dry_run", False), bool) else None


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _given(body: bytes) -> Receive:
    """Gives a body that was read already."""
    to_receive = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return to_receive.pop() if to_receive else {"type": "http.disconnect"}

    return receive


async def _asked_here(api: ASGIApp, scope: Scope, path: str, query: str, body: bytes) -> Reply:
    """This worker's own answer."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    # Other workers are asked without the caller's `accept`, too: all metrics must be in one format to be joined.
    headers = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"accept")]
    local_scope = {
        **scope,
        "path": path,
        "query_string": query.encode(),
        "headers": headers,
        "state": dict(scope.get("state", {})),
    }
    if path != scope["path"]:
        local_scope["raw_path"] = path.encode()
    try:
        await api(local_scope, _given(body), send)
    except Exception:
        if not sent:
            raise  # otherwise the answer already reports the error
    return int(sent[0]["status"]), b"".join(message.get("body", b"") for message in sent[1:])


# --- answers ----------------------------------------------------------------------------------------------------


def _refusal(replies: Sequence[Reply]) -> Reply | None:
    """The first answer that refuses the request; a 404 counts only if no worker knows the name."""
    refusals = [reply for reply in replies if reply[0] != 200]
    known_refusals = [reply for reply in refusals if reply[0] != 404]
    if known_refusals:
        return known_refusals[0]
    return refusals[0] if refusals and len(refusals) == len(replies) else None


def _response_of(reply: Reply) -> Response:
    """The reply as this server's response."""
    status, body = reply
    return Response(body, status, media_type="application/json" if status == 200 else "application/problem+json")


def _chosen(messages: Sequence[Answer], rows: Sequence[Sequence[Answer]], names: Sequence[str]) -> list[int]:
    """For each message, the number of the worker whose answer counts.

    `messages`: the messages of the request; `rows`: each worker's answers for them in a dry run, with a status if it
    refuses a message. A refusal by any worker counts, unless that worker does not know the message.
    """
    numbers = range(len(names))
    workers: list[int] = []
    for index, message in enumerate(messages):
        statuses = [rows[number][index].get("status") for number in numbers]
        refusing = [number for number in numbers if statuses[number] not in (None, _UNKNOWN)]
        ready = [number for number in numbers if statuses[number] is None]
        by_key = _worker_of_key(message, names)
        workers.append((refusing or [number for number in ready if number == by_key] or ready or [by_key])[0])
    return workers


def _by_worker(chosen: Sequence[int], items: Sequence[Answer]) -> dict[int, list[int]]:
    """The indexes of the messages that each worker publishes; refused messages are left out."""
    indexes: dict[int, list[int]] = {}
    for index, (number, item) in enumerate(zip(chosen, items, strict=True)):
        if "status" not in item:
            indexes.setdefault(number, []).append(index)
    return indexes


def _worker_of_key(message: Answer, names: Sequence[str]) -> int:
    """The worker of the message's key; without a key, the worker of its id."""
    key: Any = message.get("key")
    return names.index(shard_of_key(key if isinstance(key, str) else message["id"], names))


def joined(texts: Mapping[str, str]) -> str:
    """One text of metrics; `texts`: each worker's answer at `/metrics`, by its name."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                _, kind, family, *_ = line.split(" ", 3)
                family_heads = heads.setdefault(family, [])
                if not any(head.startswith(f"# {kind} ") for head in family_heads):
                    family_heads.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    return "".join("\n".join([*heads[family], *samples.get(family, ())]) + "\n" for family in heads)


def _labelled(line: str, worker: str) -> str:
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space:
        return f'{line[: brace + 1]}worker="{worker}",{line[brace + 1 :]}'
    return f'{line[:space]}{{worker="{worker}"}}{line[space:]}'
