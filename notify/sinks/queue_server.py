"""A queue server as the sink: it keeps a source's position with the messages before it, and knows ids.

Of a server with workers it is one worker, always the same: the others know neither the position nor the ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from notify import ids
from notify.client.http import HttpClient, items_for, read_answer
from notify.client.servers import Members, decode_members
from notify.errors import Forbidden, InvalidRequest, NotifyError, TooLarge, Unavailable, WrongRole, stale_epoch
from notify.limits import LIMITS
from notify.sinks.order import HeldBack, is_for_now, keys_of, steps_of
from notify.wire import (
    Bridged,
    BridgedTransaction,
    Item,
    PackedBridgeBatch,
    PackedPublished,
    PackedTransaction,
    RefusedReport,
    encode_msgpack,
)

POST_SECONDS = 30.0
REQUEST_ITEMS = 500
REQUEST_BYTES = 4 << 20
"""A request with several transactions has at most so many of them, or bytes."""
HEAD_BYTES = 1024
BATCH_HEAD_BYTES = HEAD_BYTES + (128 << 10)
"""A request has at most so many bytes besides its transactions; a bridge's batch two positions, and names of parts."""
DECIDED_AT_ONCE = 2000
"""A batch decides so many transactions of earlier parts at most. A server writes it in one frame, with room for what
they may hold, a hundred messages each; and their names have to fit into a request with the last part."""
BACKLOG_FULL = "backlog_full"
BEHIND = "behind_another"
"""The code of an item that was not sent, since one before it with the same key is to be put again."""
OF_THE_CONTENT = (400, 413, 422)
"""Statuses of a whole request that is refused for what is in it."""
AWAY = "the server did not answer to those before it"
Encoded = tuple[BridgedTransaction, bytes]
"""A transaction, and its bytes in a request."""
_decode_transaction = msgspec.msgpack.Decoder(BridgedTransaction).decode
_decode_bridged = msgspec.msgpack.Decoder(Bridged).decode
_decode_known = msgspec.msgpack.Decoder(dict[str, Any]).decode


class QueueSink:
    """A queue server."""

    def __init__(self, url: str) -> None:
        self._http = HttpClient(url)
        self._has_looked = False
        """Whether this asked the server for its workers."""
        self._is_worker = False
        """Whether the server is one of several workers."""
        self._epoch = 0
        """The last that this sink asked for, whether or not it learned that it got it."""

    # --- by position ------------------------------------------------------------------------------------------

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        known = await self._known(source)
        epoch, position = known["epoch"] + 1, known["position"]
        if not take_back and 0 < self._epoch < known["epoch"]:
            raise stale_epoch(f"another bridge has taken source {source!r} over; stop one of the two")
        self._epoch = epoch
        claim = PackedBridgeBatch(epoch=epoch, expected_position=position, position=position, claim=True)
        await self.append(source, claim)
        return epoch, position

    async def position(self, source: str) -> str:
        return str((await self._known(source))["position"])

    async def _known(self, source: str) -> dict[str, Any]:
        return read_answer(_decode_known, await self._call("GET", f"/v1/bridge/{source}", b""))

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        if batch.transactions:
            batch = msgspec.structs.replace(batch, refuse_whole=True)
        if len(batch.commit) + len(batch.rollback) > DECIDED_AT_ONCE:
            batch = await self._decide_most(source, batch)
        try:
            body = encode_msgpack(batch)
            answer = await self._call("POST", f"/v1/bridge/{source}/batches", body)
        except InvalidRequest as error:
            if error.status not in OF_THE_CONTENT:
                raise
            refused = [item for item in map(_fits_no_batch, batch.transactions) if item is not None]
            if refused:
                return Bridged(batch.expected_position, batch.epoch, refused=refused)
            halves = _halves(batch)
            if not isinstance(error, TooLarge) or not halves:
                raise
            return await self._append_both(source, *halves)
        return read_answer(_decode_bridged, answer)

    async def _decide_most(self, source: str, batch: PackedBridgeBatch) -> PackedBridgeBatch:
        """Decide what of earlier parts is too much for one batch, in the source's order; the batch with the rest.

        The position stays: a bridge that dies in between reads the transaction again, and the server knows its ids.
        """
        commit, rollback = batch.commit, batch.rollback
        while len(commit) + len(rollback) > DECIDED_AT_ONCE:
            back = rollback[:DECIDED_AT_ONCE]
            forward = commit[: DECIDED_AT_ONCE - len(back)]
            commit, rollback = commit[len(forward) :], rollback[len(back) :]
            stands = batch.expected_position
            await self.append(source, PackedBridgeBatch(batch.epoch, stands, stands, commit=forward, rollback=back))
        return msgspec.structs.replace(batch, commit=commit, rollback=rollback)

    async def _append_both(self, source: str, first: PackedBridgeBatch, second: PackedBridgeBatch) -> Bridged:
        """Where the second half is refused, the first one is stored, and known by its ids when it comes again."""
        before = await self.append(source, first)
        if before.refused:
            return before
        after = await self.append(source, second)
        if after.refused:
            return after
        return msgspec.structs.replace(after, stored=before.stored + after.stored, known=before.known + after.known)

    # --- by id ------------------------------------------------------------------------------------------------

    async def put(self, transactions: Sequence[BridgedTransaction]) -> list[Item]:
        putting = _Putting(await self._server(), self._is_worker)
        for step in steps_of(transactions):
            for group, some in step.items():
                await putting.put(group, some)
        return [putting.items.get(t.id) or Item(t.id, 503, code="unavailable", detail=AWAY) for t in transactions]

    async def check_queues(self) -> None:
        try:
            await self._call("GET", "/v1/bridge/relay", b"")
            return
        except NotifyError as error:
            lacks_queues = error.code == WrongRole.code
            if not lacks_queues and not isinstance(error, Forbidden):
                raise
        if not lacks_queues:  # this relay may not ask that: the members' roles say it where an address is known
            members = (await self._members(self._http)).servers()
            place = urlsplit(self._http.url).netloc
            own = [member for member in members if urlsplit(member.url).netloc == place] or members
            lacks_queues = bool(own) and not any("queue" in member.roles for member in own)
        if lacks_queues:
            raise WrongRole(
                f"the server at {self._http.url} has no queues, and would put what it gets into its database again: "
                "give --url the address of a queue server (`notify serve --roles queue --registry …`), or of Kafka"
            )

    async def show_refused(self, source: str, report: RefusedReport) -> None:
        await self._call("PUT", f"/v1/sources/{source}/refused", encode_msgpack(report))

    async def _call(self, method: str, path: str, body: bytes) -> bytes:
        return await (await self._server()).call(method, path, body, POST_SECONDS)

    async def _server(self) -> HttpClient:
        """The server's client; where the address is the port of several workers, the first worker's."""
        if not self._has_looked:
            url = self._http.url
            asking = HttpClient(url)  # a connection is one worker's for good
            try:
                found = await self._members(asking)
            finally:
                asking.close()
            is_one_port = len({urlsplit(member.url).netloc for member in found.servers()}) == 1
            if found.keys and is_one_port and url.rpartition("/")[2] not in found.keys:
                self._http.close()
                self._http = HttpClient(f"{url}/{found.keys[0]}")
            self._has_looked, self._is_worker = True, bool(found.keys)
        return self._http

    async def _members(self, http: HttpClient) -> Members:
        return read_answer(decode_members, await http.call("GET", "/v1/members", b"", POST_SECONDS))

    async def close(self) -> None:
        self._http.close()


class _Putting:
    """One call of `put`: what the server said so far, and what waits for that."""

    def __init__(self, http: HttpClient, is_worker: bool) -> None:
        """`is_worker`: whether the server is one of several workers."""
        self._http = http
        self._is_worker = is_worker
        self.items: dict[str, Item] = {}
        """By id; those that were not sent, since the server did not answer, have none."""
        self._held = HeldBack()
        self._is_away = False

    async def put(self, group: str, transactions: Sequence[BridgedTransaction]) -> None:
        """Put transactions of one producer group, a request after the other.

        A request that is refused for its content is sent again in two parts, down to the transaction. Raises
        Unavailable where the server has said nothing of any transaction yet.
        """
        waiting = deque(self._encoded(transactions))
        most = REQUEST_ITEMS
        while waiting and not self._is_away:
            request = _cut(waiting, most, each_key_once=not group)
            sent = [each for each in request if not self._is_held(each)] if self._held else request
            if not sent:
                continue
            try:
                items = await self._post(group, sent)
            except InvalidRequest as error:
                if error.status not in OF_THE_CONTENT:
                    raise
                if len(sent) == 1:
                    items = [Item("", error.status, code=error.code, detail=str(error))]
                else:
                    most = len(sent) // 2
                    waiting.extendleft(reversed(sent))
                    continue
            except Unavailable:
                if not self.items:
                    raise
                self._is_away = True
                return
            most = min(2 * most, REQUEST_ITEMS)
            for (t, _), item in zip(sent, items, strict=True):
                item.id = t.id
                self.items[t.id] = item
                if is_for_now(item):
                    self._held.hold(t, topics=item.code == BACKLOG_FULL)

    def _encoded(self, transactions: Sequence[BridgedTransaction]) -> Iterator[Encoded]:
        """Those that fit into a request; the others are refused here."""
        for t in transactions:
            try:
                encoded = _encoded(t)
            except InvalidRequest as error:
                self.items[t.id] = Item(t.id, error.status, code=error.code, detail=str(error))
                continue
            refused = _too_large(t.id, len(encoded), HEAD_BYTES)
            if refused is not None:
                self.items[t.id] = refused
                continue
            yield t, encoded

    def _is_held(self, each: Encoded) -> bool:
        t = each[0]
        if not self._held.holds(t):
            return False
        self.items[t.id] = Item(t.id, 429, code=BEHIND, detail="one before it with the same key waits")
        return True

    async def _post(self, group: str, transactions: Sequence[Encoded]) -> list[Item]:
        raws = [msgspec.Raw(encoded) for _, encoded in transactions]
        request: dict[str, Any]
        if group:
            path, request = "/v1/transactions", {"producer_group": group, "transactions": raws}
            names = [t.id for t, _ in transactions]
        else:
            path, request = "/v1/messages", {"messages": raws}
            if self._is_worker:
                request["anywhere"] = True  # the keys of all workers: one of them has the order
            names = [_published_id(t) for t, _ in transactions]
        answer = await self._http.call("POST", path, encode_msgpack(request), POST_SECONDS)
        return items_for(names, answer, self._http)


def _too_large(name: str, size: int, head_bytes: int) -> Item | None:
    """The answer to a transaction of so many bytes if it fits into no request."""
    most = LIMITS.request_bytes - head_bytes
    if size <= most:
        return None
    return Item(
        name, 413, code="request_too_large", detail=f"the transaction has {size:,} bytes; {most:,} fit a request"
    )


def _fits_no_batch(t: BridgedTransaction) -> Item | None:
    """The answer to a transaction for which a server refuses the whole batch that it is in; None if there is none."""
    encoded = encode_msgpack(t)
    try:
        _decode_transaction(encoded)
    except msgspec.MsgspecError as error:
        return Item(t.id, 422, code="unreadable", detail=f"its row is no message: {error}")
    return _too_large(t.id, len(encoded), BATCH_HEAD_BYTES)


def _halves(batch: PackedBridgeBatch) -> tuple[PackedBridgeBatch, PackedBridgeBatch] | None:
    """A batch in two, of which the second has the position; None where it is a part of a large transaction, or one."""
    some = batch.transactions
    if len(some) < 2 or batch.prepare or batch.commit or batch.rollback:
        return None
    middle = len(some) // 2
    replace = msgspec.structs.replace
    first = replace(batch, transactions=some[:middle], position=batch.expected_position)
    return first, replace(batch, transactions=some[middle:])


def _encoded(transaction: BridgedTransaction) -> bytes:
    """A transaction as it stands in a request; one without a producer group was published, as one message.

    Raises InvalidRequest for what stands in no request.
    """
    if transaction.producer_group:
        return encode_msgpack(PackedTransaction(id=transaction.id, messages=transaction.messages, committed=True))
    if len(transaction.messages) != 1:
        raise InvalidRequest("a transaction of several messages needs a producer group")
    message = transaction.messages[0]
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return encode_msgpack(PackedPublished(**fields, id=_published_id(transaction)))


def _published_id(transaction: BridgedTransaction) -> str:
    """The id of the only message of a transaction without a producer group."""
    return ids.message_id(ids.from_text(transaction.id), 0)


def _cut(waiting: deque[Encoded], most: int, each_key_once: bool) -> list[Encoded]:
    """Take what goes into the next request: one transaction at least.

    `each_key_once`: the route may take a message and refuse one before it that has the same key for now.
    """
    request: list[Encoded] = []
    size = 0
    keys: set[tuple[str, str]] = set()
    while waiting and len(request) < most:
        t, encoded = waiting[0]
        size += len(encoded)
        if request and size > REQUEST_BYTES:
            break
        if each_key_once:
            if not keys.isdisjoint(keys_of(t)):
                break
            keys |= keys_of(t)
        request.append(waiting.popleft())
    return request
