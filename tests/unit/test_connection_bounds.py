"""The server holds a bounded amount for each connection, for a bounded time, whatever the client sends or reads."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from notify.errors import Unauthorized
from notify.server.access.principal import Principal
from notify.server.access.rights import parse_rights
from notify.server.connections import head as request_head
from notify.server.connections import held, pipeline, protocol
from notify.server.connections.held import KEPT_BYTES, MIDDLE_BODY_BYTES, Budget, Room
from notify.server.connections.protocol import BODY_PARTS, HEADER_FIELDS, STRANGERS_PARTS
from notify.server.data.answer import Answer
from notify.server.data.request import Request
from tests.support.connection import READ_BYTES, Served, SlowAccess, head, settled
from tests.support.virtual_loop import pass_seconds

pytestmark = pytest.mark.virtual_time

KNOWN = head("known", 2) + b"{}"
PAGE = b"GET /login HTTP/1.1\r\nhost: x\r\n\r\n"
PROBE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


async def asgi_page(scope: Any, receive: Any, send: Any) -> None:
    """Reads its body to the end, as FastAPI does, and answers."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


# --- requests that wait for their turn ------------------------------------------------------------------------------


@pytest.mark.parametrize("request_bytes", [KNOWN, PAGE, PROBE])
async def test_of_pipelined_requests_a_bounded_number_is_held(request_bytes: bytes) -> None:
    served = Served()
    served.use_asgi(asgi_page)
    served.may_answer.clear()
    served.send(KNOWN)
    await settled()
    served.send(request_bytes * 10_000)
    served.protocol.data_received(request_bytes * 10_000)  # one read of the socket may bring all requests
    assert len(served.protocol.pipeline) <= pipeline.PIPELINED
    served.may_answer.set()
    await settled()
    await pass_seconds(pipeline.PIPELINED * pipeline.PACE_SECONDS)
    await settled()
    # The server answers the requests that it took; the last answer says that the connection ends, and it does.
    assert served.statuses() == [200] * (pipeline.PIPELINED + 1)
    assert served.transport.written.count(b"connection: close") == 1
    assert served.transport.written.rindex(b"HTTP/1.1") < served.transport.written.index(b"connection: close")
    await pass_seconds(protocol.LINGER_SECONDS + 1)
    assert served.transport.is_closed


async def test_nothing_is_read_while_requests_wait_for_their_turn() -> None:
    """Reading stays paused while requests wait. Each answer used to resume it, however many still waited."""
    served = Served()
    served.use_asgi(asgi_page)
    served.send(PAGE * 20)
    while served.protocol.pipeline:
        assert served.transport.is_paused
        await pass_seconds(pipeline.PACE_SECONDS / 2)
    await settled()
    assert served.statuses() == [200] * 20 and not served.transport.is_paused
    served.send(KNOWN)
    await settled()
    assert served.statuses() == [200] * 21


@pytest.mark.parametrize("request_bytes", [PAGE, PROBE])
async def test_pipelined_requests_of_strangers_come_at_a_pace(request_bytes: bytes) -> None:
    served = Served()
    served.use_asgi(asgi_page)
    served.send(request_bytes * 10)
    await settled()
    assert served.statuses() == [200]
    await pass_seconds(3.5 * pipeline.PACE_SECONDS)
    assert served.statuses() == [200] * 4
    # The connection is lost: the server never begins the other requests.
    served.transport.is_closed = True
    served.protocol.connection_lost(None)
    await pass_seconds(10 * pipeline.PACE_SECONDS)
    assert served.statuses() == [200] * 4


async def test_a_lost_connection_ends_the_poll_of_an_earlier_request_too() -> None:
    served = Served()
    ended = asyncio.Event()

    async def wait(request: Request) -> Answer:
        request.polls = True
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        raise AssertionError("nothing sets it")

    served.protocol.app.data.answer = wait  # type: ignore[method-assign]
    served.send(KNOWN + KNOWN)
    await settled()
    served.transport.is_closed = True
    served.protocol.connection_lost(None)
    await settled()
    assert ended.is_set()


@pytest.mark.parametrize(
    ("path", "is_whole", "stays"),
    [("/v1/messages", True, True), ("/v1/messages", False, False), ("/v1/groups/g/receive", True, False)],
    ids=["a request", "half a request", "a poll"],
)
async def test_a_client_that_only_ends_its_own_direction_is_answered_unless_it_may_be_dead(
    path: str, is_whole: bool, stays: bool
) -> None:
    """A consumer that was killed looks the same: it is sent no messages."""
    served = Served()
    served.may_answer.clear()
    request = head("known", 2).replace(b"/v1/messages", path.encode()) + b"{}"
    served.send(KNOWN + request[: None if is_whole else -1])
    assert served.protocol.eof_received() is stays
    served.may_answer.set()
    await settled()
    assert served.transport.is_closed is stays
    assert served.statuses() == ([200, 200] if is_whole else [200])


async def test_a_malformed_request_is_refused_after_the_answers_before_it() -> None:
    served = Served()
    served.may_answer.clear()
    served.send(KNOWN + b"this is no request\r\n\r\n")
    await settled()
    assert served.transport.written == b""
    served.may_answer.set()
    await settled()
    assert served.statuses() == [200, 400] and b'"code":"malformed"' in served.transport.written


# --- heads and trailers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        b"x-long: " + b"y" * (70 << 10) + b"\r\n",
        b"".join(b"x-%d: y\r\n" % n for n in range(HEADER_FIELDS)),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_head_beyond_its_bounds_is_refused_however_it_comes(lines: bytes, at_once: bool) -> None:
    served = Served()
    request = PAGE[:-2] + lines + b"\r\n"
    if at_once:
        served.protocol.data_received(request)
    else:
        served.send(request)
    await settled()
    assert served.statuses() == [431] and b'"code":"head_too_large"' in served.transport.written
    await pass_seconds(protocol.LINGER_SECONDS)
    assert served.transport.is_closed


CHUNKED = (
    b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer known\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
)


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/admin/limits"])
@pytest.mark.parametrize("trailers", [b"x: y\r\n", b"y" * 1000])
async def test_trailers_are_bounded(path: bytes, trailers: bytes) -> None:
    served = Served()
    served.use_asgi(asgi_page)
    served.send(CHUNKED % path + b"x-first: ")
    for _ in range((2 << 20) // len(trailers)):
        if served.protocol._is_over or served.transport.is_closed:
            break
        served.send(trailers)
    else:
        pytest.fail("two megabytes of trailers were taken")
    assert sum(len(name) + len(value) for name, value in served.protocol.headers) < 1000
    await pass_seconds(protocol.LINGER_SECONDS + 1)
    assert served.transport.is_closed


async def test_a_trailer_does_not_pass_for_a_field_of_the_head() -> None:
    served = Served()
    seen: list[bytes] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        await asgi_page(scope, receive, send)
        seen.extend(name for name, _ in scope["headers"])

    served.use_asgi(note)
    served.send(CHUNKED % b"/v1/admin/limits" + b"x-user: admin\r\nexpect: 100-continue\r\n\r\n")
    await settled()
    assert served.statuses() == [200] and b"x-user" not in seen
    served.send(KNOWN)
    await settled()
    assert served.statuses() == [200, 200]


# --- time -----------------------------------------------------------------------------------------------------------


async def test_a_line_between_requests_does_not_keep_the_connection() -> None:
    """A CRLF behind an answer leaves keep-alive's time as it is. One CRLF used to cancel it for good."""
    served = Served()
    served.send(KNOWN)
    await settled()
    served.send(b"\r\n")
    await pass_seconds(protocol.HEADER_SECONDS)
    assert served.statuses() == [200] and served.transport.is_closed


async def test_a_head_behind_a_poll_has_its_time_once_the_poll_is_answered() -> None:
    served = Served()
    served.may_answer.clear()
    served.send(KNOWN + KNOWN[:40])
    await pass_seconds(3 * protocol.HEADER_SECONDS)
    assert not served.transport.is_closed
    served.may_answer.set()
    await settled()
    await pass_seconds(protocol.HEADER_SECONDS / 2)
    assert served.statuses() == [200] and not served.transport.is_closed
    await pass_seconds(protocol.HEADER_SECONDS)
    assert served.transport.is_closed


async def test_100_continue_comes_behind_the_answers_before_it() -> None:
    served = Served()
    served.use_asgi(asgi_page)
    for path in (b"/v1/messages", b"/v1/admin/limits"):
        served.transport.written = b""
        served.may_answer.clear()
        asks = head("known", 5, "expect: 100-continue").replace(b"/v1/messages", path)
        served.send(KNOWN + asks)
        await settled()
        assert served.transport.written == b""
        served.may_answer.set()
        await pass_seconds(pipeline.PACE_SECONDS)
        await settled()
        assert served.statuses() == [200, 100]
        served.send(b"[1,2]")
        await settled()
        assert served.statuses() == [200, 100, 200]


async def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for() -> None:
    """After an early answer, such as a 401, the rest of the body has a bounded time. It had unlimited time."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    served = Served()
    served.use_asgi(refuse)
    request = head("stranger", 100).replace(b"/v1/messages", b"/v1/admin/limits")
    served.send(request + b"x" * 99)
    await settled()
    served.send(b"x" + KNOWN)  # the end of the body came in time, so that the connection is kept
    await pass_seconds(protocol.LINGER_SECONDS + 1)
    assert served.statuses() == [401, 200] and not served.transport.is_closed
    served.send(request)
    for _ in range(4):
        await pass_seconds(1)
        served.send(b"x")
    assert served.transport.is_closed


@pytest.mark.parametrize("is_lost", [True, False])
async def test_nothing_of_a_request_stays_with_its_connection(is_lost: bool) -> None:
    """A connection keeps nothing of a request that is over. Bodies of idle and lost connections took 235 MB in 5 s."""
    served = Served()
    bodies: list[weakref.ref[Request]] = []

    class Followed(Request):
        """A request that allows weak references."""

    async def note(request: Request) -> Answer:
        bodies.append(weakref.ref(request))
        return Answer(422, "text/plain", b"refused")

    served.protocol.app.data.answer = note  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_head, "Request", Followed)
        served.send(head("known", 1 << 20) + b"x" * (1 << 20))
        await settled()
    if is_lost:
        served.transport.is_closed = True
        served.protocol.connection_lost(None)
    gc.disable()
    try:
        assert len(bodies) == 1 and bodies[0]() is None
        assert served.protocol.cycle is None if is_lost else served.protocol.cycle._chunks == []
    finally:
        gc.enable()


# --- another protocol -----------------------------------------------------------------------------------------------

UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")


async def test_an_upgrade_is_ignored_and_the_body_read_as_declared() -> None:
    """java.net.http.HttpClient asks for HTTP/2 in this way by default, and so does `curl --http2`."""
    served = Served()
    served.use_asgi(asgi_page)
    for n in range(2):
        served.send(head("known", 15, *UPGRADE) + b'{"messages":[]}')
        await settled()
        assert served.statuses() == [200] * (n + 1)
    assert [r.body for r in served.answered] == [b'{"messages":[]}'] * 2
    served.send(PAGE[:-2] + "\r\n".join((*UPGRADE, "", "")).encode() + KNOWN)
    await settled()
    chunked = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    served.send(head("known", 0, *UPGRADE).replace(b"content-length: 0\r\n", b"")[:-2] + chunked + KNOWN)
    await settled()
    assert served.statuses() == [200] * 6 and not served.transport.is_closed


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
async def test_nothing_is_smuggled_in_the_body_of_an_upgrade(step: int) -> None:
    """A body that looks like a request gets no answer. Behind a proxy that passes `Upgrade` on, it used to get one."""
    served = Served()
    smuggled = head("known", 2) + b"{}"
    data = head("known", len(smuggled), *UPGRADE) + smuggled + head("known", 4) + b"null"
    for at in range(0, len(data), step):
        served.send(data[at : at + step])
        await settled()
    assert [r.body for r in served.answered] == [smuggled, b"null"] and served.statuses() == [200, 200]


async def test_connect_to_another_host_is_refused() -> None:
    served = Served()
    served.send(b"CONNECT other.example:443 HTTP/1.1\r\nhost: other.example\r\n\r\nbytes of another protocol")
    await settled()
    assert served.statuses() == [405] and served.answered == []


# --- answers that nobody reads --------------------------------------------------------------------------------------


async def test_who_does_not_read_is_cut() -> None:
    served = Served()
    served.send(KNOWN)
    await settled()
    served.protocol.pause_writing()
    await pass_seconds(protocol.WRITE_SECONDS - 1)
    assert not served.transport.is_aborted
    served.protocol.resume_writing()  # the client has read in time
    await pass_seconds(protocol.WRITE_SECONDS)
    assert not served.transport.is_aborted
    served.protocol.pause_writing()
    await pass_seconds(protocol.WRITE_SECONDS)
    assert served.transport.is_aborted


async def test_the_next_answer_is_not_made_before_the_last_is_read() -> None:
    served = Served()
    served.protocol.pause_writing()
    served.send(KNOWN)
    await settled()
    assert served.answered == []
    served.protocol.resume_writing()
    await settled()
    assert len(served.answered) == 1 and served.statuses() == [200]


async def test_a_connection_that_ends_does_not_wait_for_its_reader() -> None:
    """A connection whose client does not read is cut at its end. Closing waited for the write buffer, for good."""
    served = Served()
    served.send(KNOWN)
    await settled()
    await pass_seconds(served.protocol.timeout_keep_alive)
    assert served.transport.is_closed and not served.transport.is_aborted
    await pass_seconds(protocol.LINGER_SECONDS)
    assert served.transport.is_aborted


async def test_answers_that_are_not_read_are_bounded_for_all_together() -> None:
    budget = Budget()
    slow = [Served(budget=budget) for _ in range(20)]
    for served in slow:
        served.send(KNOWN)
        await settled()
        served.transport.unread_bytes = 4 << 20
        served.protocol.pause_writing()
        assert budget.known.total + budget.strangers.total <= held.HELD_BYTES
    # The connections whose answers have waited for longest are cut first.
    cut = [served.transport.is_aborted for served in slow]
    assert cut == sorted(cut, reverse=True) and 0 < cut.count(False) < 20
    for served in slow:
        served.transport.is_closed = True
        served.protocol.connection_lost(None)
    assert budget.known.total == budget.strangers.total == 0


async def test_an_unread_answer_takes_the_share_of_the_one_who_asked() -> None:
    """A reply of 8 MiB is more than all strangers together may leave unread."""
    budget = Budget()
    served = Served(budget=budget)
    write = served.transport.write

    def unread(data: bytes) -> None:
        write(data)
        served.transport.unread_bytes = 8 << 20
        served.protocol.pause_writing()

    served.transport.write = unread  # type: ignore[method-assign]
    served.send(KNOWN)
    await settled()
    assert budget.known.total == 8 << 20 and not served.transport.is_aborted


def test_the_more_is_unread_the_smaller_is_a_reply() -> None:
    class Reader:
        """One who does not give way before the budget is used up."""

        def give_way(self) -> None:
            raise AssertionError("the budget is used up")

    budget = Budget()
    readers = [Reader() for _ in range(9)]
    assert budget.reply_bytes(8 << 20) == 8 << 20
    sizes = []
    for reader in readers:
        sizes.append(budget.reply_bytes(8 << 20))
        budget.known.count(reader, "one", sizes[-1])
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == held.LEAST_REPLY_BYTES


@pytest.mark.parametrize("path", [b"/v1/messages", b"/login"])
async def test_the_chunks_of_a_body_are_bounded(path: bytes) -> None:
    """A body in chunks of two bytes each took ten times its size in memory, and seconds of the loop."""
    served = Served()
    served.use_asgi(asgi_page)
    lines = b"authorization: Bearer known\r\ntransfer-encoding: chunked"
    served.send(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n\r\n")
    chunks = b"2\r\n{}\r\n" * 1000
    for _ in range(BODY_PARTS // 1000):
        served.protocol.data_received(chunks)
    await settled()
    assert not served.protocol._is_over and served.statuses() == []
    served.protocol.data_received(chunks)
    await settled()
    if path == b"/login":
        assert served.transport.is_closed
    else:
        assert served.statuses() == [413] and b"65536 chunks" in served.transport.written
    assert served.send(chunks) and not served.answered


async def test_the_bodies_of_strangers_are_bounded_for_all_together() -> None:
    budget = Budget()
    body = b"x" * (64 << 10)
    strangers = [Served(budget=budget) for _ in range(2 * budget.strangers.most // len(body))]
    for n, served in enumerate(strangers):
        served.send(head(f"s{n}", len(body) + 1) + body)
        assert budget.strangers.total <= budget.strangers.most
        await settled()
    # The oldest gave way, with 503, to be sent again; the newest wait for their verification.
    statuses = [served.statuses() for served in strangers]
    waiting = statuses.count([])
    assert statuses == [[503]] * (len(statuses) - waiting) + [[]] * waiting and waiting > len(statuses) / 3
    for served in strangers[-waiting:]:
        served.access.refuse(f"s{strangers.index(served)}", Unauthorized("no"))
    await settled()
    assert [served.statuses() for served in strangers[-waiting:]] == [[401]] * waiting
    for served in strangers:
        served.protocol.connection_lost(None)
    assert budget.strangers.total == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "begun",
    [
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: " + b"y" * 60_000,
        b"POST /do/settings.put HTTP/1.1\r\nhost: x\r\ncontent-length: 70000\r\n\r\n" + b"x" * 60_000,
    ],
)
async def test_of_what_strangers_began_a_bounded_amount_is_held(begun: bytes) -> None:
    """Their sum is bounded, too. 5,000 heads that never ended held 460 MB, and 1,000 forms more than a gigabyte."""
    budget = Budget()
    strangers = [Served(budget=budget) for _ in range(budget.strangers.most // 10_000)]
    for served in strangers:
        served.use_asgi(asgi_page)
        served.send(begun)
        await settled()
        assert budget.strangers.total <= budget.strangers.most
    kept = [served for served in strangers if not served.transport.is_closed]
    assert 0 < len(kept) < len(strangers) / 4
    assert {tuple(served.statuses()) for served in strangers if served.transport.is_closed} == {(503,)}
    # One that has little is not cut for those that have much.
    small = Served(budget=budget)
    small.send(PROBE[:20])
    for _ in range(500):
        Served(budget=budget).send(begun)
    small.send(PROBE[20:])
    await settled()
    assert small.statuses() == [200]


@pytest.mark.parametrize(("path", "token"), [(b"/login", b""), (b"/v1/messages", b"slow"), (b"/v1/messages", b"none")])
async def test_a_strangers_body_comes_in_few_parts(path: bytes, token: bytes) -> None:
    """Chunks of a byte cost half a microsecond each; 65,536 of them, of anyone, held the loop for 30 ms."""

    def refuse(authorization: bytes, certificate: str | None) -> Principal | None:
        raise Unauthorized("no")

    served = Served()
    served.use_asgi(asgi_page)
    if token == b"none":
        served.access.admit = refuse  # type: ignore[method-assign]
    served.send(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + token)
    served.send(b"\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(3):
        served.protocol.data_received(b"1\r\nx\r\n" * 1000)
    assert served.protocol._body_parts <= 2 * STRANGERS_PARTS and served.protocol._is_over
    await settled()
    assert served.statuses() == ({b"slow": [413], b"none": [401], b"": []}[token])


@pytest.mark.long
async def test_a_large_body_waits_for_room_and_is_not_cut() -> None:
    """As many of the largest bodies as there is room for are read at a time; the others are not read meanwhile."""
    budget = Budget()
    size = 8 << 20
    clients = [Served(budget=budget) for _ in range(20)]
    data = [head("known", size) + b"x" * size for _ in clients]
    done: set[int] = set()
    while len(done) < len(clients):
        moved = False
        for n, served in enumerate(clients):
            if data[n]:
                taken = served.send(data[n][:READ_BYTES])
                data[n] = data[n][taken:]
                moved = moved or taken > 0
            elif served.statuses():
                done.add(n)
        assert budget.room.taken <= budget.room.most
        await settled()
        assert moved or any(not left for left in data)
    assert [served.statuses() for served in clients] == [[200]] * 20
    assert all(len(served.answered[0].body) == size for served in clients)
    assert budget.room.taken == 0 and budget.known.total == 0


async def test_a_sender_with_many_half_bodies_gives_way_to_another() -> None:
    budget = Budget()
    size = 8 << 20
    access = SlowAccess()
    access.principals = {b"Bearer many": Principal("many", None), b"Bearer one": Principal("one", None)}
    many = [Served(budget=budget, access=access) for _ in range(10)]
    for served in many:
        served.send(head("many", size) + b"x" * (1 << 20))
        await settled()
    one = Served(budget=budget, access=access)
    data = head("one", size) + b"x" * size
    while data:
        taken = one.send(data)
        assert taken, "it waits for one that sends no more"
        data = data[taken:]
        await settled()
    assert one.statuses() == [200]
    assert [served.statuses() for served in many].count([503]) == 1


class Sending:
    """A large body. If it gives way, the requests of others are refused with it: what is held for all is bounded."""

    def __init__(self, room: Room, *with_it: Sending) -> None:
        self.room, self.with_it, self.has_room = room, with_it, False

    def enter(self) -> None:
        self.has_room = True

    def give_way(self) -> bool:
        for body in (self, *self.with_it):
            self.room.leave(body)
        return True


def test_a_body_that_is_refused_while_another_gives_way_takes_no_room() -> None:
    """Its room was never given back, so that in the end no large body had any."""
    room = Room(KEPT_BYTES + 4 * MIDDLE_BODY_BYTES)
    refused, behind, other = (Sending(room) for _ in range(3))
    for body in (Sending(room, refused, other), Sending(room)):
        room.ask(body, "who has much", 2 * MIDDLE_BODY_BYTES)
    room.ask(other, "a third", KEPT_BYTES + 4 * MIDDLE_BODY_BYTES)  # never has room
    room.ask(refused, "who has none", MIDDLE_BODY_BYTES + 1)
    room.ask(behind, "who has none", MIDDLE_BODY_BYTES + 1)
    assert not refused.has_room and not other.has_room and behind.has_room
    assert room.taken == 2 * MIDDLE_BODY_BYTES + MIDDLE_BODY_BYTES + 1


async def test_a_large_body_of_one_without_any_right_to_send_it_is_not_read() -> None:
    served = Served()
    served.access.principals = {b"Bearer reader": Principal("reader", parse_rights(["read:zzz"]))}
    served.send(head("reader", 8 << 20) + b"x")
    await settled()
    assert served.statuses() == [403]
    assert served.answered == []


async def test_a_form_that_declares_too_much_is_refused_before_any_of_it_is_held() -> None:
    served = Served()
    served.use_asgi(asgi_page)
    served.send(b"POST /login?next=/ HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\ntoken=" + b"x" * 200_000)
    assert served.protocol.app.budget.strangers.total == 0
    await settled()
    assert served.statuses() == [413] and b"connection: close" in served.transport.written
    served.send(b"x" * 700_000)  # read and dropped, so that the client reads its answer
    assert served.protocol.app.budget.strangers.total == 0 and not served.transport.is_paused


async def test_a_connection_has_no_dict_of_its_attributes() -> None:
    """A dict for each of thousands of connections would take 2 kB of the 4 that a connection takes."""
    served = Served()
    served.use_asgi(asgi_page)
    served.send(PAGE + KNOWN)
    await settled()
    await pass_seconds(1)
    assert served.statuses() == [200, 200]
    assert vars(served.protocol) == {}, "name these in __slots__"
