"""The data routes: decode by content type, call the core, encode the answer. No logic of their own, and no I/O."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import struct
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec

from notify import faults, ids, tracing
from notify.errors import Forbidden, InvalidRequest, NotFound, NotifyError, StorageFailed, Unauthorized
from notify.limits import LIMITS, bounds_of_clients, check_between, check_name
from notify.server.access import EVERYONE, Principal
from notify.server.access.browsers import refuse_foreign_host, refuse_foreign_pages
from notify.server.access.principal import ENDED
from notify.server.core.core import Core
from notify.server.core.flow import retry_after
from notify.server.delivery.leases import Handed
from notify.server.topics import described
from notify.settings import Settings
from notify.storage import crash_point
from notify.storage.records import StoredMessage
from notify.wire import (
    JSON,
    MSGPACK,
    PROBLEM,
    DeliveryHead,
    Item,
    Items,
    JsonBridgeBatch,
    JsonMessages,
    JsonTransactions,
    Outcomes,
    PackedBridgeBatch,
    PackedMessages,
    PackedTransactions,
    Payload,
    Poll,
    Problem,
    Receive,
    ReplayedHead,
    Settle,
    SettledItems,
    States,
    Subscribe,
    WholeInbox,
    body_fields,
    decode_payload,
    encode_json,
    encode_msgpack,
    instant,
    microseconds,
)

Route = Callable[..., Awaitable[bytes]]
"""A function that answers a request to a data route: called with the request, and with the names in its path."""

PROBES = ("/livez", "/readyz")
"""Paths that are answered to anyone, and as directly as the data routes: orchestrators ask for them often."""


def fault_of(event: str, method: str, path: str) -> NotifyError:
    """The answer to a request on which the server itself failed; the log says why, from within the `except` block."""
    faults.unexpected(event, method=method, path=path[:200])
    return StorageFailed("the server failed on this request; its log says why")


def _decoders(json_type: Any, packed_type: Any) -> tuple[Any, Any]:
    return msgspec.json.Decoder(json_type).decode, msgspec.msgpack.Decoder(packed_type).decode


_TRANSACTIONS = _decoders(JsonTransactions, PackedTransactions)
_MESSAGES = _decoders(JsonMessages, PackedMessages)
_OUTCOMES = _decoders(Outcomes, Outcomes)
_STATES = _decoders(States, States)
_POLL = _decoders(Poll, Poll)
_RECEIVE = _decoders(Receive, Receive)
_SETTLE = _decoders(Settle, Settle)
_BRIDGE = _decoders(JsonBridgeBatch, PackedBridgeBatch)
_SUBSCRIBE = _decoders(Subscribe, Subscribe)
_WHOLE_INBOX = _decoders(WholeInbox, WholeInbox)


class Request:
    """One request to a data route, and the format of its body and of its answer."""

    __slots__ = (
        "authorization",
        "body",
        "headers",
        "method",
        "packed",
        "path",
        "polls",
        "principal",
        "query",
        "retry_after",
    )

    def __init__(self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """`headers` with names in lower case; the body is set when it is complete."""
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.authorization = b""
        """The header, where access is on."""
        self.principal: Principal | None = EVERYONE
        """Who asks; None: that is still being found out."""
        self.packed = False
        self.retry_after = 0
        """Seconds after which refused items may be sent again; 0 where there are none."""
        self.polls = False
        """It only waits for something to hand out: of no use to a client that has gone."""

    def find_format(self, settings: Settings) -> None:
        """Set `packed`: of a body its type, else what the client accepts.

        Raises InvalidRequest for a content type or encoding that is not served, Forbidden for a foreign page's
        request.
        """
        kind = accepted = host = b""
        from_browser = False
        for name, value in self.headers:
            if name == b"content-type":
                kind = value
            elif name == b"accept":
                accepted = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise InvalidRequest("compressed bodies are not taken", "unsupported_encoding", 415)
            elif name == b"host":
                host = value
            elif name in _OF_BROWSERS:
                from_browser = True
        if from_browser:
            refuse_foreign_pages(self.method, self.headers, settings)
        elif not settings.access:
            refuse_foreign_host(host, settings)
        if self.method not in _WITH_BODY:
            self.packed = b"msgpack" in accepted
            return
        packed = _FORMATS.get(kind)
        if packed is None:
            packed = _FORMATS.get(kind.partition(b";")[0].strip().lower())
            if packed is None:
                shown = kind.decode("latin-1")[:60]
                raise InvalidRequest(f"send {JSON} or {MSGPACK}, not {shown!r}", "unsupported_type", 415)
        self.packed = packed

    def decode(self, decoders: tuple[Any, Any]) -> Any:
        """The body by its schema. Raises InvalidRequest (400 where it is malformed, 422 where a type is wrong)."""
        try:
            return decoders[self.packed](self.body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), "invalid_schema") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            kind = "msgpack" if self.packed else "JSON"
            raise InvalidRequest(f"the body is not {kind}: {error}", "malformed", 400) from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply", "malformed", 400) from None

    def encode(self, value: Any) -> bytes:
        return encode_msgpack(value) if self.packed else encode_json(value)


_WITH_BODY = ("POST", "PUT")
_OF_BROWSERS = (b"origin", b"sec-fetch-site")

_FORMATS = {
    MSGPACK.encode(): True,
    b"application/x-msgpack": True,
    JSON.encode(): False,
    b"": False,
    b"application/x-www-form-urlencoded": False,  # what curl -d says
}


class Answer:
    """An answer: one status, one body."""

    __slots__ = ("body", "kind", "retry_after", "status")

    def __init__(self, status: int, kind: str, body: bytes, retry_after: int = 0) -> None:
        """`retry_after` in seconds, 0 for none."""
        self.status = status
        self.kind = kind
        self.body = body
        self.retry_after = retry_after

    @classmethod
    def problem(cls, error: NotifyError) -> Answer:
        """An error as a problem of RFC 9457."""
        return cls(error.status, PROBLEM, problem(error), math.ceil(retry_after(error) or 0))

    def encoded(self, headers: list[tuple[bytes, bytes]], keep_alive: bool, with_body: bool) -> bytes:
        """As HTTP/1.1, with these headers of the server's own."""
        head = _HEADS.get((self.status, self.kind))
        if head is None:
            phrase = HTTPStatus(self.status).phrase
            head = f"HTTP/1.1 {self.status} {phrase}\r\ncontent-type: {self.kind}\r\n".encode()
            _HEADS[(self.status, self.kind)] = head
        chunks = [head, b"content-length: %d\r\n" % len(self.body)]
        chunks += [b"%b: %b\r\n" % header for header in headers]
        if self.status == 401:
            chunks.append(b"www-authenticate: Bearer\r\n")
        if self.retry_after:
            chunks.append(b"retry-after: %d\r\n" % self.retry_after)
        chunks.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
        if with_body:
            chunks.append(self.body)
        return b"".join(chunks)


_HEADS: dict[tuple[int, str], bytes] = {}


class DataRoutes:
    """Answers requests to the data routes."""

    ROUTES: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("POST", "/v1/transactions", "transactions"),
        ("POST", "/v1/transactions/outcomes", "outcomes"),
        ("POST", "/v1/transactions/states", "states"),
        ("POST", "/v1/checks/poll", "poll"),
        ("POST", "/v1/messages", "messages"),
        ("GET", "/v1/members", "members"),
        ("GET", "/v1/bridge/{source}", "bridge_position"),
        ("POST", "/v1/bridge/{source}/batches", "bridge_batch"),
        ("POST", "/v1/groups/{group}/receive", "receive"),
        ("POST", "/v1/groups/{group}/settle", "settle"),
        ("PUT", "/v1/groups/{group}/subscriptions/{topic}", "subscribe"),
        ("PUT", "/v1/groups/{group}/subscriptions/{topic}/inbox", "tell_inbox"),
        ("GET", "/v1/topics/{topic}", "topic"),
        ("GET", "/v1/topics/{topic}/queues/{queue}/messages", "pull"),
        ("GET", "/v1/limits", "limits"),
    )
    """Method, path and the name of what answers: every data route there is."""

    def __init__(
        self,
        core: Core,
        members: Callable[[], dict[str, Any]] | None = None,
        reply_bytes: Callable[[int], int] = lambda most: most,
    ) -> None:
        """`members` gives what `GET /v1/members` answers, `reply_bytes` how large a reply may be at this moment."""
        self.core = core
        self._reply_bytes = reply_bytes
        self._members = members or (lambda: {"version": 0, "members": []})
        self._plain: dict[str, dict[str, Route]] = {}
        self._named: dict[tuple[object, ...], dict[str, Route]] = {}
        """Routes with names in them, by their nouns: each noun is followed by a name, or ends the path."""
        for method, path, name in self.ROUTES:
            if "{" in path:
                methods = self._named.setdefault(_nouns(path.split("/")), {})
            else:
                methods = self._plain.setdefault(path, {})
            methods[method] = getattr(self, name)

    async def answer(self, request: Request) -> Answer:
        """Every outcome is an answer: what is refused, and why, too."""
        try:
            route, names = self._find(request.method, request.path)
            request.find_format(self.core.settings)
            principal = request.principal
            assert principal is not None, "a request comes here once it is known who asks"
            if principal is not EVERYONE:
                principal.take_request(self.core.clock())
            body = await route(request, *names)
        except NotifyError as error:
            if error.status == 507:
                self.core.metrics.refused_full += 1
            return Answer.problem(error)
        except Exception:
            return Answer.problem(fault_of("request_failed", request.method, request.path))
        return Answer(200, MSGPACK if request.packed else JSON, body, request.retry_after)

    def _find(self, method: str, path: str) -> tuple[Route, list[str]]:
        """The function that answers a request, and the names in its path.

        Raises NotFound, InvalidRequest for a route that takes other methods.
        """
        methods = self._plain.get(path)
        names: list[str] = []
        if methods is None:
            parts = path.split("/")
            methods = self._named.get(_nouns(parts))
            names = parts[3::2]
        if methods is None:
            raise NotFound(f"there is no route {path[:100]!r}")
        route = methods.get(method)
        if route is None:
            taken = " or ".join(sorted(methods))
            raise InvalidRequest(f"this route takes {taken}, not {method}", "method_not_allowed", 405)
        return route, names

    # --- producers --------------------------------------------------------------------------------------------

    async def transactions(self, request: Request) -> bytes:
        asked: JsonTransactions | PackedTransactions = request.decode(_TRANSACTIONS)
        _check(request, "check", asked.producer_group)
        items = await self.core.transactions.put(asked, request.principal)
        crash_point.reached("half.before_answer")
        return _encode_items(request, items)

    async def outcomes(self, request: Request) -> bytes:
        asked: Outcomes = request.decode(_OUTCOMES)
        _check(request, "check", asked.producer_group)
        return request.encode(Items(await self.core.outcomes.record(asked.producer_group, asked.outcomes)))

    async def states(self, request: Request) -> bytes:
        asked: States = request.decode(_STATES)
        _check(request, "check", asked.producer_group)
        return request.encode(Items(await self.core.outcomes.states(asked.producer_group, asked.ids)))

    async def messages(self, request: Request) -> bytes:
        return _encode_items(
            request, await self.core.transactions.publish(request.decode(_MESSAGES), request.principal)
        )

    async def poll(self, request: Request) -> bytes:
        asked: Poll = request.decode(_POLL)
        _check(request, "check", asked.producer_group)
        with _polling(request):
            checks = await self.core.checks.poll(asked)
        return request.encode({"checks": checks if request.packed else [json_check(check) for check in checks]})

    async def members(self, request: Request) -> bytes:
        """Where the servers are is for all who have a right to something; who else is there takes `view`."""
        principal = request.principal
        assert principal is not None
        if principal.rights is not None and not principal.rights:
            raise Forbidden(f"{principal.name} has no right to anything: an administrator can grant one")
        shown = self._members()
        if not principal.may("view"):
            shown = shown | {"members": [m | {"detail": {}} for m in shown["members"] if m["kind"] == "server"]}
        return request.encode(shown)

    async def limits(self, request: Request) -> bytes:
        """The bounds of the contract, and those rates that concern who asks."""
        principal = request.principal
        assert principal is not None
        rates = dataclasses.asdict(self.core.flow.limits.concerning(principal))
        return request.encode(bounds_of_clients() | {"rates": rates})

    # --- bridges ----------------------------------------------------------------------------------------------

    async def bridge_position(self, request: Request, source: str) -> bytes:
        _check(request, "bridge", source)
        return request.encode(self.core.bridges.position(source))

    async def bridge_batch(self, request: Request, source: str) -> bytes:
        _check(request, "bridge", source)
        return request.encode(await self.core.bridges.append(source, request.decode(_BRIDGE)))

    # --- consumers --------------------------------------------------------------------------------------------

    async def receive(self, request: Request, group: str) -> bytes:
        asked: Receive = request.decode(_RECEIVE)
        check_name("group", group)
        # Before rights are asked for each of them; delivery, which others call too, has the same bound.
        check_between("the number of topics", len(asked.topics or ()), 0, LIMITS.topics)
        for topic in asked.topics or ():
            _check(request, "consume", group, topic)
        may = _may_consume(request, group)
        with _polling(request):
            handed = await self.core.delivery.receive(group, asked, may)
        if self.core.settings.tracing:
            _trace(group, handed, self.core.clock())
        if request.packed:
            return packed_deliveries(handed)
        return encode_json({"messages": _json_deliveries(handed)})

    async def settle(self, request: Request, group: str) -> bytes:
        asked: Settle = request.decode(_SETTLE)
        check_name("group", group)
        may = _may_consume(request, group)
        return request.encode(SettledItems(await self.core.delivery.settle(group, asked.items, may)))

    async def subscribe(self, request: Request, group: str, topic: str) -> bytes:
        asked: Subscribe = request.decode(_SUBSCRIBE)
        _check_subscriber(request, group, topic)
        subscriptions = self.core.subscriptions
        return request.encode(await subscriptions.put(subscriptions.checked(group, topic, asked), asked.start))

    async def tell_inbox(self, request: Request, group: str, topic: str) -> bytes:
        asked: WholeInbox = request.decode(_WHOLE_INBOX)
        _check_subscriber(request, group, topic)
        await self.core.subscriptions.tell_inbox(group, topic, max(0, microseconds(asked.whole_from)))
        return request.encode({"group": group, "topic": topic})

    async def topic(self, request: Request, topic: str) -> bytes:
        """Whoever may publish to a topic, consume it or pull from it may know its queues and its policy."""
        check_name("topic", topic)
        principal = request.principal
        assert principal is not None
        if not (principal.may("publish", topic) or principal.may_some("consume", topic=topic)):
            principal.check("read", topic)
        known = self.core.queues.topic(topic)
        if known is None:
            raise NotFound(f"there is no topic {topic[:100]!r}")
        return request.encode(described(self.core.queues, known))

    async def pull(self, request: Request, topic: str, queue: str) -> bytes:
        _check(request, "read", topic)
        offset, limit = _pull_query(request.query)
        if not (queue.isascii() and queue.isdigit() and len(queue) <= 5):
            raise NotFound(f"there is no queue {queue[:20]!r} of topic {topic[:60]!r}")
        store = self.core.queues
        start, _ = store.bounds(topic, int(queue))
        if offset < start:
            raise InvalidRequest(f"offset {offset} is below {start}, the first one retained", "below_start", 410)
        found = store.read(topic, int(queue), offset, limit, self._reply_bytes(LIMITS.reply_bytes))
        next_offset = found[-1].offset + 1 if found else offset
        sound = [m for m in found if not m.corrupt]
        if request.packed:
            return packed_pulled(sound, next_offset)
        return encode_json({"messages": [json_pulled(m) for m in sound], "next_offset": next_offset})


_NAMED = {"check": "producer_group", "bridge": "source", "consume": "group", "read": "topic"}
"""The kind of thing that a right to this action names."""


def _check(request: Request, action: str, name: str, topic: str = "*") -> None:
    """Raises InvalidRequest for what is no name, Forbidden where who asks may not."""
    check_name(_NAMED[action], name)
    if topic != "*":
        check_name("topic", topic)
    principal = request.principal
    assert principal is not None
    if principal is not EVERYONE:
        principal.check(action, name, topic)


def _check_subscriber(request: Request, group: str, topic: str) -> None:
    """As `_check` for `consume`, of a topic or a pattern of topics."""
    check_name("group", group)
    check_name("topic", topic.replace("*", "x"))
    principal = request.principal
    assert principal is not None
    if principal is not EVERYONE:
        principal.check("consume", group, topic)


def _may_consume(request: Request, group: str) -> Callable[[str], bool] | None:
    """Whether who asks may consume a topic with a group, as of the moment it is asked; None: every topic.

    Raises Forbidden where it may consume none.
    """
    principal = request.principal
    assert principal is not None
    if principal is EVERYONE:
        return None
    principal.check_some("consume", group)
    return lambda topic: principal.may("consume", group, topic)


@contextlib.contextmanager
def _polling(request: Request) -> Iterator[None]:
    """While a request waits for something to hand out.

    Raises Backpressure where its principal has too many, Unauthorized where that ends meanwhile.
    """
    principal = request.principal
    task = asyncio.current_task()
    assert principal is not None
    assert task is not None
    request.polls = True
    with principal.waiting(task.cancel):
        try:
            yield
        except asyncio.CancelledError:
            if not principal.is_over:
                raise
            task.uncancel()
            raise Unauthorized(ENDED) from None


def _encode_items(request: Request, items: list[Item]) -> bytes:
    waits = [item.retry_after for item in items if item.retry_after is not None]
    if waits:
        request.retry_after = math.ceil(min(waits))
    return request.encode(Items(items))


def _nouns(parts: list[str]) -> tuple[object, ...]:
    """What the paths of one route have in common: their length, the version, and every second part from there on."""
    return len(parts), *parts[:3], *parts[4::2]


def _pull_query(query: bytes) -> tuple[int, int]:
    values = {"offset": 0, "max": 100}
    for pair in query.decode("latin-1").split("&") if query else []:
        name, _, text = pair.partition("=")
        if name not in values:
            raise InvalidRequest(f"there is no parameter {name[:40]!r}; there are offset and max", "invalid_schema")
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            raise InvalidRequest(f"{name} is not a number", "invalid_schema")
        values[name] = int(text)
    check_between("max", values["max"], 1, LIMITS.max_messages)
    check_between("offset", values["offset"], 0, 1 << 62)
    return values["offset"], values["max"]


# --- encoding of deliveries -----------------------------------------------------------------------------------


def _array_head(count: int) -> bytes:
    return (
        bytes((0x90 | count,))
        if count < 16
        else struct.pack(">BH" if count < 65536 else ">BI", 0xDC if count < 65536 else 0xDD, count)
    )


_MAP_HEADS = [bytes((n,)) for n in range(256)]


def packed_deliveries(handed: list[Handed]) -> bytes:
    """{"messages": […]} in msgpack, joined from the stored bytes: a payload is a map, and gets a head's fields."""
    chunks = [b"\x81\xa8messages", _array_head(sum([len(h.messages) for h in handed]))]
    last_us, at = -1, ""
    for h in handed:
        for receipt, m, attempt in h.each():
            if m.committed_us != last_us:
                last_us, at = m.committed_us, instant(m.committed_us)
            payload = m.payload
            name = ids.message_id(m.transaction_id, m.message_no)
            if h.replay:
                head = encode_msgpack(ReplayedHead(receipt, name, m.queue, m.offset, attempt, at, h.replay))
            else:
                head = encode_msgpack(DeliveryHead(receipt, name, m.queue, m.offset, attempt, at))
            # Both maps have fewer than 16 fields, so that their heads are one byte each.
            chunks += (_MAP_HEADS[payload[0] + head[0] - 0x80], head[1:], payload[1:])
    return b"".join(chunks)


def packed_pulled(found: list[StoredMessage], next_offset: int) -> bytes:
    chunks = [b"\x82\xa8messages", _array_head(len(found))]
    for m in found:
        fields = {
            "id": ids.message_id(m.transaction_id, m.message_no),
            "queue": m.queue,
            "offset": m.offset,
            "committed_at": instant(m.committed_us),
        }
        chunks += (_MAP_HEADS[m.payload[0] + 4], encode_msgpack(fields)[1:], m.payload[1:])
    chunks += (encode_msgpack("next_offset"), encode_msgpack(next_offset))
    return b"".join(chunks)


def _json_message(payload: Payload) -> dict[str, Any]:
    fields: dict[str, Any] = {"topic": payload.topic}
    if payload.key is not None:
        fields["key"] = payload.key
    if payload.tag is not None:
        fields["tag"] = payload.tag
    fields["headers"] = payload.headers or {}
    return fields | body_fields(payload.body)


def _trace(group: str, handed: list[Handed], now_us: int) -> None:
    """Add what was handed out to the traces of the messages: from their commit to now."""
    for h in handed:
        for _, m, attempt in h.each():
            p = decode_payload(m.payload)
            attributes: dict[str, str | int] = {"consumer.group.name": group, "notify.attempt": attempt}
            tracing.record("deliver", m.topic, p.headers, m.committed_us, now_us, **attributes)


def json_check(check: dict[str, Any]) -> dict[str, Any]:
    """A check of a poll, its messages as JSON has them."""
    return check | {"messages": [_json_message(m) for m in check["messages"]]}


def json_pulled(m: StoredMessage) -> dict[str, Any]:
    return {
        "id": ids.message_id(m.transaction_id, m.message_no),
        "queue": m.queue,
        "offset": m.offset,
        "committed_at": instant(m.committed_us),
        **_json_message(decode_payload(m.payload)),
    }


def _json_deliveries(handed: list[Handed]) -> list[dict[str, Any]]:
    return [
        {"receipt": receipt, "attempt": attempt, **json_pulled(message), **({"replay": h.replay} if h.replay else {})}
        for h in handed
        for receipt, message, attempt in h.each()
    ]


def problem(error: NotifyError) -> bytes:
    title = type(error).__name__
    name = f"urn:notify:error:{error.code}"
    return encode_json(Problem(name, title, error.status, str(error), error.code, error.retryable, retry_after(error)))
