"""The data routes: they decode the body, check rights, call the core, and encode the answer. No I/O of their own."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec

from notify.errors import Conflict, Forbidden, InvalidRequest, NotFound, NotifyError, WrongRole
from notify.protocol import ids
from notify.protocol.latency import HANDLED, SLOWEST, WAITED, parsed, parsed_slowest
from notify.protocol.limits import LIMITS, bounds_of_clients, check_between, check_name, digits, instant_us
from notify.protocol.wire import (
    JSON,
    MSGPACK,
    Item,
    Items,
    JsonBridgeBatch,
    JsonMessages,
    JsonSchedule,
    JsonTransactions,
    Leave,
    LeftBehindReport,
    Outcomes,
    PackedBridgeBatch,
    PackedMessages,
    PackedSchedule,
    PackedTransactions,
    Poll,
    Receive,
    RefusedReport,
    ScheduleDeclared,
    ScheduleDeleted,
    Settle,
    SettledItems,
    States,
    Subscribe,
    WholeInbox,
    WithdrawalState,
    encode_json,
)
from notify.runtime.urls import text_of_missing
from notify.runtime.visible import one_line
from notify.server.access.principal import EVERYONE
from notify.server.core.admission import failed
from notify.server.core.core import Core
from notify.server.data.answer import Answer, fault_of
from notify.server.data.eager import Eager
from notify.server.data.encode import (
    json_check,
    json_deliveries,
    json_pulled,
    packed_deliveries,
    packed_pulled,
    packed_runs,
    trace,
)
from notify.server.data.permission import check, check_subscriber, may_consume, polling
from notify.server.data.request import Request
from notify.server.latency import Latency
from notify.server.schedules.schedules import Schedules
from notify.server.topics import described
from notify.storage import crash_point
from notify.storage.names import DEAD_LETTER_PREFIX

DECLARED, NEXT = "declared in code", 3
"""Why a schedule changes that a service declares, and how many of its next instants the answer has."""
MOST_DECLARED = 10
"""How often a declaration is compared with the stored one while others change it."""
ANY_ADDRESS = ("0.0.0.0", "::")


def reached(shown: dict[str, Any], host: str) -> dict[str, Any]:
    """The answer of `GET /v1/members` in which servers that listen on all addresses have `host`, the request's host: in
    a container, or behind a mapped port, they know no other name.

    Members of a registry run on other machines, and keep the addresses that they announce.
    """
    if not host or (shown["version"] and "keys" not in shown):
        return shown
    return shown | {"members": [member | {"url": _reached(member["url"], host)} for member in shown["members"]]}


def _reached(url: str, host: str) -> str:
    parts = urlsplit(url)
    if parts.hostname not in ANY_ADDRESS:
        return url
    if parts.scheme == "http":
        return parts._replace(netloc=host).geturl()
    # With TLS each worker has its own port.
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()


WAITING = ("poll", "receive")
"""The routes whose requests wait on purpose: how long they take says nothing."""
_REPORTED = {WAITED: "consumer_to_handler", HANDLED: "handler"}
"""The histogram that each parameter of a settlement is counted in."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}").fullmatch
REMEMBERED_CHARACTERS = 500
"""The routes of paths up to this length are cached: no path with valid names is longer."""

Route = Callable[..., Awaitable[bytes | list[bytes]]]
"""A function that answers a request to a data route, with a body or its parts; its arguments are the request and the
names in the path."""


def _decoders(json_type: Any, packed_type: Any) -> tuple[Any, Any]:
    return msgspec.json.Decoder(json_type).decode, msgspec.msgpack.Decoder(packed_type).decode


_TRANSACTIONS = _decoders(JsonTransactions, PackedTransactions)
_MESSAGES = _decoders(JsonMessages, PackedMessages)
_SCHEDULE = _decoders(JsonSchedule, PackedSchedule)
_OUTCOMES = _decoders(Outcomes, Outcomes)
_STATES = _decoders(States, States)
_POLL = _decoders(Poll, Poll)
_RECEIVE = _decoders(Receive, Receive)
_SETTLE = _decoders(Settle, Settle)
_LEAVE = _decoders(Leave, Leave)
_BRIDGE = _decoders(JsonBridgeBatch, PackedBridgeBatch)
_REFUSED = _decoders(RefusedReport, RefusedReport)
_LEFT_BEHIND = _decoders(LeftBehindReport, LeftBehindReport)
_SUBSCRIBE = _decoders(Subscribe, Subscribe)
_WHOLE_INBOX = _decoders(WholeInbox, WholeInbox)


class DataRoutes:
    """Answers requests to the data routes."""

    ROUTES: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("POST", "/v1/transactions", "transactions"),
        ("POST", "/v1/transactions/outcomes", "outcomes"),
        ("POST", "/v1/transactions/states", "states"),
        ("POST", "/v1/transactions/left-behind", "report_left_behind"),
        ("POST", "/v1/checks/poll", "poll"),
        ("POST", "/v1/messages", "messages"),
        ("PUT", "/v1/schedules/{schedule}", "schedule"),
        ("DELETE", "/v1/schedules/{schedule}", "unschedule"),
        ("GET", "/v1/members", "members"),
        ("GET", "/v1/bridge/{source}", "bridge_position"),
        ("POST", "/v1/bridge/{source}/batches", "bridge_batch"),
        ("PUT", "/v1/sources/{source}/refused", "report_refused"),
        ("POST", "/v1/groups/{group}/receive", "receive"),
        ("POST", "/v1/groups/{group}/settle", "settle"),
        ("POST", "/v1/groups/{group}/leave", "leave"),
        ("PUT", "/v1/groups/{group}/subscriptions/{topic}", "subscribe"),
        ("PUT", "/v1/groups/{group}/subscriptions/{topic}/inbox", "report_inbox"),
        ("GET", "/v1/topics/{topic}", "topic"),
        ("GET", "/v1/topics/{topic}/queues/{queue}/messages", "pull"),
        ("GET", "/v1/withdrawals/{id}", "withdrawal"),
        ("GET", "/v1/limits", "limits"),
    )
    """(method, path, name of the method that answers) of every data route."""

    def __init__(
        self,
        core: Core,
        members: Callable[[], dict[str, Any]] | None = None,
        reply_bytes: Callable[[int], int] = lambda most: most,
        schedules: Schedules | None = None,
    ) -> None:
        """`members` returns the answer of `GET /v1/members`, `reply_bytes` how large a reply may be now.
        `schedules`: None if this server has none."""
        self.core = core
        self._schedules = schedules
        self._reply_bytes = reply_bytes
        self._members = members or (lambda: {"version": 0, "members": []})
        self.invites_outcomes = True
        """Whether the answer of `GET /v1/members` tells producers to send outcomes in requests with halves."""
        self._find_again = lru_cache(maxsize=1000)(self._find)
        self._plain: dict[str, dict[str, tuple[Route, Latency]]] = {}
        self._named: dict[tuple[object, ...], dict[str, tuple[Route, Latency]]] = {}
        """Routes with names in their paths, by the path's shape; see `_nouns`."""
        for method, path, name in self.ROUTES:
            if "{" in path:
                methods = self._named.setdefault(_nouns(path.split("/")), {})
            else:
                methods = self._plain.setdefault(path, {})
            latency = Latency() if name in WAITING else core.metrics.latencies["request"].of(f"{method} {path}")
            methods[method] = getattr(self, name), latency

    async def answer(self, request: Request) -> Answer:
        """The answer to a request; an error is an answer too."""
        try:
            path = request.path
            find = self._find_again if len(path) <= REMEMBERED_CHARACTERS else self._find
            began = time.perf_counter()
            route, names, latency = find(request.method, path)
            request.find_format(self.core.settings)
            principal = request.principal
            if principal is not EVERYONE:
                principal.take_request(self.core.clock())
            try:
                body = await route(request, *names)
            finally:
                latency.add(round((time.perf_counter() - began) * 1e6))
        except NotifyError as error:
            if error.status == 507:
                self.core.metrics.refused_full += 1
            return Answer.problem(error)
        except Exception:
            return Answer.problem(fault_of("request_failed", request.method, request.path))
        return Answer(200, MSGPACK if request.packed else JSON, body, request.retry_after)

    def _find(self, method: str, path: str) -> tuple[Route, list[str], Latency]:
        """(the function that answers a request, the names in the path, how long such requests take).

        Raises NotFound, and InvalidRequest if the route takes other methods.
        """
        methods = self._plain.get(path)
        names: list[str] = []
        if methods is None:
            parts = path.split("/")
            methods = self._named.get(_nouns(parts))
            names = parts[3::2]
        if methods is None:
            raise NotFound(text_of_missing(method, path))
        found = methods.get(method)
        if found is None:
            allowed = " or ".join(sorted(methods))
            raise InvalidRequest(f"this route takes {allowed}, not {method}", "method_not_allowed", 405)
        return found[0], names, found[1]

    # --- producers --------------------------------------------------------------------------------------------

    async def transactions(self, request: Request) -> bytes:
        body: JsonTransactions | PackedTransactions = request.decode(_TRANSACTIONS)
        check(request, "check", body.producer_group)
        if self._is_for_any_worker(request) and any(t.committed for t in body.transactions):
            self._check_names_worker(request)
        self.core.transactions.check(body)
        if body.outcomes:
            with Eager(self._recorded(request, body)) as recorded:
                items, outcomes = await self.core.transactions.put(body, request.principal), await recorded
        else:
            items, outcomes = await self.core.transactions.put(body, request.principal), None
        crash_point.reached("half.before_answer")
        return _encode_items(request, items, outcomes)

    async def _recorded(self, request: Request, body: JsonTransactions | PackedTransactions) -> list[Item]:
        """Record the outcomes of a request with halves. A failure refuses the outcomes only: the halves are stored."""
        try:
            return await self.core.outcomes.record(body.producer_group, body.outcomes)
        except NotifyError as error:
            failure = error
        except Exception:
            failure = fault_of("outcomes_failed", request.method, request.path)
        return [failed(o.id, failure) for o in body.outcomes]

    async def outcomes(self, request: Request) -> bytes:
        body: Outcomes = request.decode(_OUTCOMES)
        check(request, "check", body.producer_group)
        return request.encode(Items(await self.core.outcomes.record(body.producer_group, body.outcomes)))

    async def states(self, request: Request) -> bytes:
        body: States = request.decode(_STATES)
        check(request, "check", body.producer_group)
        return request.encode(Items(await self.core.outcomes.states(body.producer_group, body.ids)))

    async def report_left_behind(self, request: Request) -> bytes:
        report: LeftBehindReport = request.decode(_LEFT_BEHIND)
        check(request, "check", report.producer_group)
        self.core.left_behind.report(report)
        return request.encode({"producer_group": report.producer_group})

    async def messages(self, request: Request) -> bytes:
        body: JsonMessages | PackedMessages = request.decode(_MESSAGES)
        if body.anywhere:
            self._check_names_worker(request)
        items = await self.core.transactions.publish(body, request.principal, anywhere=body.anywhere)
        return _encode_items(request, items)

    async def schedule(self, request: Request, name: str) -> bytes:
        body: JsonSchedule | PackedSchedule = request.decode(_SCHEDULE)
        schedules = self._having_schedules()
        for attempt in range(MOST_DECLARED):
            change = await schedules.wanted(name, body, request.principal)
            try:
                await schedules.declare(name, change, _instance(request), DECLARED)
                break
            except Conflict:  # all instances of a service declare it as they start: most likely the same
                if attempt == MOST_DECLARED - 1:
                    raise
        coming = [datetime.fromisoformat(text) for text in schedules.next_of(change.timetable, NEXT)]
        return request.encode(ScheduleDeclared(name, change.is_change, coming))

    async def unschedule(self, request: Request, name: str) -> bytes:
        check_name("schedule", name)
        schedules = self._having_schedules()
        try:
            topic = (await schedules.one(name)).declaration.message.topic
        except NotFound:
            request.principal.check_some("publish")
            return request.encode(ScheduleDeleted(name, False))
        request.principal.check("publish", topic, called="the schedule's topic")
        return request.encode(ScheduleDeleted(name, await schedules.delete(name, _instance(request), DECLARED)))

    def _having_schedules(self) -> Schedules:
        if self._schedules is None:
            raise WrongRole("this server has no schedules")
        return self._schedules

    async def poll(self, request: Request) -> bytes:
        body: Poll = request.decode(_POLL)
        check(request, "check", body.producer_group)
        with polling(request, self.core.clock):
            checks = await self.core.checks.poll(body)
        return request.encode({"checks": checks if request.packed else [json_check(check) for check in checks]})

    async def members(self, request: Request) -> bytes:
        """A principal with any right sees the servers; the other members need the right `view`."""
        principal = request.principal
        if principal.rights is not None and not principal.rights:
            raise Forbidden(f"{principal.name} has no right to anything: an administrator can grant one")
        host = next((value for name, value in request.headers if name == b"host"), b"")
        shown = reached(self._members(), host.decode("latin-1"))
        if not principal.may("view"):
            shown = shown | {"members": [m | {"detail": {}} for m in shown["members"] if m["kind"] == "server"]}
        return request.encode(shown | {"outcomes_with_halves": self.invites_outcomes})

    async def limits(self, request: Request) -> bytes:
        """The bounds of the contract, and the rates that concern the principal."""
        principal = request.principal
        rates = dataclasses.asdict(self.core.flow.limits.concerning(principal))
        return request.encode(bounds_of_clients() | {"rates": rates})

    # --- bridges ----------------------------------------------------------------------------------------------

    async def bridge_position(self, request: Request, source: str) -> bytes:
        check(request, "bridge", source)
        self._check_names_worker(request)
        return request.encode(self.core.bridges.position(source))

    async def bridge_batch(self, request: Request, source: str) -> bytes:
        check(request, "bridge", source)
        self._check_names_worker(request)
        return request.encode(await self.core.bridges.append(source, request.decode(_BRIDGE)))

    async def report_refused(self, request: Request, source: str) -> bytes:
        check(request, "bridge", source)
        self.core.refusals.report(source, request.decode(_REFUSED))
        return request.encode({"source": source})

    def _is_for_any_worker(self, request: Request) -> bool:
        """Whether the request came to the one port of several workers, and names no worker."""
        settings = self.core.settings
        return bool(settings.key_shards) and not settings.tls_certificate and not request.names_worker

    def _check_names_worker(self, request: Request) -> None:
        """Raises InvalidRequest if a request of a bridge or relay names no worker, although there are several.

        Only one worker knows a source's position and the ids that were moved: another worker would store all again.
        """
        if self._is_for_any_worker(request):
            raise InvalidRequest(
                "only one worker knows what a bridge or relay has moved, and this request names none: send all of it "
                f"to the address of one worker, always the same, such as …/{self.core.settings.key_shards[0]}",
                "names_no_worker",
                421,
            )

    # --- consumers --------------------------------------------------------------------------------------------

    async def receive(self, request: Request, group: str) -> bytes | list[bytes]:
        body: Receive = request.decode(_RECEIVE)
        may = may_consume(request, group, body.topics or ())
        with polling(request, self.core.clock):
            query = request.query.split(b"&")
            in_runs = request.packed and b"runs=yes" in query
            options: Any = {
                "subscribes": b"subscribe=no" not in query,
                "request_id": _request_id(query),
                "in_runs": in_runs and not self.core.settings.tracing,
            }
            handed = await self.core.delivery.receive(group, body, may, **options)
        if self.core.settings.tracing:
            trace(group, handed, self.core.clock())
        if in_runs:
            return packed_runs(handed)
        if request.packed:
            return packed_deliveries(handed)
        return encode_json({"messages": json_deliveries(handed)})

    async def settle(self, request: Request, group: str) -> bytes:
        body: Settle = request.decode(_SETTLE)
        may = may_consume(request, group)
        settled = await self.core.delivery.settle(group, body.items, may)
        if request.query:
            self._count_handled(group, request.query)
        return request.encode(SettledItems(settled))

    def _count_handled(self, group: str, query: bytes) -> None:
        """Count what a consumer reports with a settlement: how long its messages waited and its handlers took."""
        for pair in query.decode("latin-1").split("&", 3):
            name, _, text = pair.partition("=")
            if name == SLOWEST:
                self._exemplify_slowest(group, text)
            kind = _REPORTED.get(name)
            report = None if kind is None else parsed(text)
            if kind is not None and report is not None:
                self.core.metrics.latencies[kind].of(group).add_all(report)

    def _exemplify_slowest(self, group: str, text: str) -> None:
        """Note the trace that a consumer reports with its slowest call of a handler, if one is wanted."""
        slowest = parsed_slowest(text)
        if slowest is not None:
            us, trace_id = slowest
            handler = self.core.metrics.latencies["handler"].of(group)
            handler.exemplify(us, self.core.clock(), lambda: trace_id)

    async def leave(self, request: Request, group: str) -> bytes:
        body: Leave = request.decode(_LEAVE)
        self.core.delivery.leave(group, body.instance, may_consume(request, group))
        return request.encode({"group": group, "instance": body.instance})

    async def subscribe(self, request: Request, group: str, topic: str) -> bytes:
        body: Subscribe = request.decode(_SUBSCRIBE)
        check_subscriber(request, group, topic)
        subscriptions = self.core.subscriptions
        wanted = subscriptions.checked(group, topic, body)
        if "*" not in topic and not topic.startswith(DEAD_LETTER_PREFIX):
            self.core.topics.check_use(topic)
        return request.encode(await subscriptions.put(wanted, body.start, _instance(request)))

    async def report_inbox(self, request: Request, group: str, topic: str) -> bytes:
        body: WholeInbox = request.decode(_WHOLE_INBOX)
        check_subscriber(request, group, topic)
        await self.core.subscriptions.report_inbox(group, topic, instant_us("whole_from", body.whole_from))
        return request.encode({"group": group, "topic": topic})

    async def topic(self, request: Request, topic: str) -> bytes:
        """A principal that may publish to, consume or read a topic sees its queues and policy."""
        check_name("topic", topic)
        principal = request.principal
        if not (principal.may("publish", topic) or principal.may_some("consume", topic=topic)):
            principal.check("read", topic)
        found_topic = self.core.queues.topic(topic)
        if found_topic is None:
            raise NotFound(f"there is no topic {topic[:100]!r}")
        return request.encode(described(self.core.queues, found_topic))

    async def withdrawal(self, request: Request, message_id: str) -> bytes:
        """The fate of a message that withdraws another one, for those who may send to its topic."""
        found = self.core.queues.withdrawal(*ids.parse_message_id(message_id), self.core.clock())
        if found is None:
            raise NotFound(f"this server knows no withdrawal {message_id[:60]!r}", "unknown_withdrawal")
        if not request.principal.may("publish", found.topic):  # whose name the answer does not tell
            raise Forbidden("the right to publish to the topic of this withdrawal is missing")
        outcome = found.fate.name if found.fate is not None else "ROLLED_BACK" if found.rolled_back else "UNDECIDED"
        return request.encode(
            WithdrawalState(message_id, found.wanted.text, found.topic, outcome, found.wanted.replaces)
        )

    async def pull(self, request: Request, topic: str, queue: str) -> bytes:
        check_name("topic", topic)
        check(request, "read", topic)
        offset, limit = _pull_query(request.query)
        number = digits(queue, 5)
        if number is None:
            raise NotFound(f"there is no queue {queue[:20]!r} of topic {topic[:60]!r}")
        store = self.core.queues
        start, end = store.bounds(topic, number)
        if offset < start:
            raise InvalidRequest(f"offset {offset} is below {start}, the first one retained", "below_start", 410)
        if offset > end:
            raise InvalidRequest(
                f"offset {offset} is beyond {end}, the end of the queue: the topic was deleted and made again, or this "
                "server has lost messages that were read; read from earliest",
                "beyond_end",
                410,
            )
        messages = store.read(topic, number, offset, limit, self._reply_bytes(LIMITS.reply_bytes))
        next_offset = messages[-1].offset + 1 if messages else offset
        sound = [m for m in messages if not m.corrupt]
        described_topic = store.topic(topic)
        topic_number = 0 if described_topic is None else described_topic.number
        if request.packed:
            return packed_pulled(sound, next_offset, topic_number)
        rows = [json_pulled(m) for m in sound]
        return encode_json({"messages": rows, "next_offset": next_offset, "topic_number": topic_number})


def _encode_items(request: Request, items: list[Item], outcomes: list[Item] | None = None) -> bytes:
    waits = [item.retry_after for item in items if item.retry_after is not None]
    if waits:
        request.retry_after = math.ceil(min(waits))
    return request.encode(Items(items, outcomes or []))


def _nouns(parts: list[str]) -> tuple[object, ...]:
    """The shape that the paths of one route share: the number of parts, the first three, and every second one after."""
    return len(parts), *parts[:3], *parts[4::2]


def _instance(request: Request) -> str:
    """Who makes a request, for people: the principal, and the instance that it names in its query."""
    named = next((f[9:] for f in request.query.split(b"&") if f.startswith(b"instance=")), b"")
    instance = one_line(unquote_to_bytes(named).decode(errors="replace")[:255])
    return " ".join(
        part for part in ("" if request.principal is EVERYONE else request.principal.name, instance) if part
    )


def _request_id(query: list[bytes]) -> str:
    """The name of a request to receive, in its query; "": it has none. Raises InvalidRequest."""
    named = next((field for field in query if field.startswith(b"request=")), b"request=")[8:]
    if named and not _REQUEST_ID(named):
        raise InvalidRequest(
            "request= is 1 to 64 of A-Z a-z 0-9 . _ -: a new name for each request, the same one if it comes again",
            "invalid_name",
        )
    return named.decode("latin-1")


def _pull_query(query: bytes) -> tuple[int, int]:
    values = {"offset": 0, "max": 100}
    for pair in query.decode("latin-1").split("&") if query else []:
        name, _, text = pair.partition("=")
        if name not in values:
            raise InvalidRequest(f"there is no parameter {name[:40]!r}; there are offset and max", "invalid_schema")
        value = digits(text)
        if value is None:
            raise InvalidRequest(f"{name} is not a number", "invalid_schema")
        values[name] = value
    check_between("max", values["max"], 1, LIMITS.max_messages)
    check_between("offset", values["offset"], 0, 1 << 62)
    return values["offset"], values["max"]
