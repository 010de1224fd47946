"""A queue server as the sink: it stores a source's position with the messages before it, and recognises ids.

If the server has workers, the sink always uses the same worker: the other workers know neither position nor ids.

A proxy in between may answer itself. If the server is reachable all the same, the proxy does not pass this request on,
for its size or its content: it is sent in parts. What it does not pass on alone waits, as does what is after it in the
order of its keys, and is sent again until someone changes the proxy: it is not refused, because no server has seen it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from notify.client.transport.http import HttpClient, items_for, read_answer
from notify.client.transport.servers import Members, decode_members
from notify.errors import (
    Forbidden,
    ForeignAnswer,
    InvalidRequest,
    NotifyError,
    TooLarge,
    Unavailable,
    WrongRole,
    stale_epoch,
)
from notify.movers.long_positions import LongPosition
from notify.movers.sinks.order import HeldBack, is_for_now, keys_of, steps_of
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import (
    UNDECODABLE,
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
LOOK_SECONDS = 5.0
"""How long to wait for the answer that shows whether the server is reachable."""
NOT_PASSED_SECONDS = 5.0
"""How long a transaction waits that a proxy did not pass on alone."""
NOT_PASSED_MOST = 10_000
"""The most such transactions that are remembered."""
REQUEST_ITEMS = 500
REQUEST_BYTES = 4 << 20
"""The most transactions, and bytes, of a request with several transactions."""
HEAD_BYTES = 1024
BATCH_HEAD_BYTES = HEAD_BYTES + (128 << 10)
"""The most bytes of a request without its transactions. A bridge's batch also has two positions, and ids of parts."""
DECIDED_AT_ONCE = 2000
"""The most transactions of earlier parts that a batch decides. A server writes the batch in one frame, with room for a
hundred messages of each; and their ids must fit into a request together with the last part."""
BACKLOG_FULL = "backlog_full"
BEHIND = "behind_another"
"""The code of an item that was not sent, because an earlier one with the same key has to be put again."""
OF_THE_CONTENT = (400, 413, 422)
"""Statuses of a whole request that is refused because of its content."""
AWAY = "the server did not answer to those before it"
Encoded = tuple[BridgedTransaction, bytes]
"""A transaction, and its bytes in a request."""
_decode_transaction = msgspec.msgpack.Decoder(BridgedTransaction).decode
_decode_bridged = msgspec.msgpack.Decoder(Bridged).decode
_decode_state = msgspec.msgpack.Decoder(dict[str, Any]).decode


class QueueSink:
    """Puts transactions into a queue server."""

    def __init__(self, url: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds."""
        self._http = HttpClient(url)
        self._monotonic = monotonic
        self._has_looked = False
        """Whether the server was asked for its workers."""
        self._is_worker = False
        """Whether the server is one of several workers."""
        self._epoch = 0
        """The last epoch that this sink requested, whether or not it got an answer."""
        self._at: dict[str, LongPosition] = {}
        """The last known position by source."""
        self._not_passed: dict[str, tuple[float, Item]] = {}
        """By id, the transactions that a proxy did not pass on alone: until when each waits (monotonic), its item."""

    # --- by position ------------------------------------------------------------------------------------------

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        state = await self._state(source)
        at = self._at[source] = LongPosition(state["position"], state.get("base", ""))
        epoch, position = state["epoch"] + 1, at.whole
        if not take_back and 0 < self._epoch < state["epoch"]:
            raise stale_epoch(f"another bridge has taken source {source!r} over; stop one of the two")
        self._epoch = epoch
        claim = PackedBridgeBatch(epoch=epoch, expected_position=position, position=position, claim=True)
        await self.append(source, claim)
        return epoch, position

    async def position(self, source: str) -> str:
        state = await self._state(source)
        return LongPosition(state["position"], state.get("base", "")).whole

    async def _state(self, source: str) -> dict[str, Any]:
        """The epoch and position of a source at the server."""
        return read_answer(_decode_state, await self._call("GET", f"/v1/bridge/{source}", b""))

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        at = self._at.get(source) or LongPosition()
        expected = at.stored if batch.expected_position == at.whole else batch.expected_position
        after = at.moved(batch.position)
        base = LongPosition.becoming_base(batch.position) if after is None else None
        stored = expected if after is None else after.stored
        answer = await self._append(source, msgspec.structs.replace(batch, expected_position=expected, position=stored))
        if answer.refused:
            return msgspec.structs.replace(answer, position=batch.expected_position)
        if base is not None:
            # A base takes much of a request, so it is stored with the position alone. Should that fail, the bridge
            # reads again what the batch has, and the server recognises the ids.
            await self._append(source, PackedBridgeBatch(batch.epoch, expected, base.stored, base=batch.position))
        self._at[source] = base or after or at
        return msgspec.structs.replace(answer, position=batch.position)

    async def _append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        """Append a batch with positions as they are stored."""
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
            parts = _parts(batch)
            if not isinstance(error, TooLarge) or not parts:
                raise
            return await self._append_both(source, *parts)
        except ForeignAnswer:
            parts = _parts(batch)
            if not parts or not await (await self._server()).is_reachable(LOOK_SECONDS):
                raise
            return await self._append_both(source, *parts)
        return read_answer(_decode_bridged, answer)

    async def _decide_most(self, source: str, batch: PackedBridgeBatch) -> PackedBridgeBatch:
        """Decide the transactions of earlier parts that exceed one batch, in the source's order; the remaining batch.

        The position does not move: a bridge that dies in between reads the transaction again, and the server recognises
        its ids.
        """
        commit, rollback = batch.commit, batch.rollback
        position = batch.expected_position
        while len(commit) + len(rollback) > DECIDED_AT_ONCE:
            roll_back_now = rollback[:DECIDED_AT_ONCE]
            commit_now = commit[: DECIDED_AT_ONCE - len(roll_back_now)]
            commit, rollback = commit[len(commit_now) :], rollback[len(roll_back_now) :]
            decided = PackedBridgeBatch(batch.epoch, position, position, commit=commit_now, rollback=roll_back_now)
            await self._append(source, decided)
        return msgspec.structs.replace(batch, commit=commit, rollback=rollback)

    async def _append_both(self, source: str, first: PackedBridgeBatch, second: PackedBridgeBatch) -> Bridged:
        """Append two parts of a batch. If the second is refused, the server will recognise the first by its ids."""
        before = await self._append(source, first)
        if before.refused:
            return before
        after = await self._append(source, second)
        if after.refused:
            return after
        return msgspec.structs.replace(after, stored=before.stored + after.stored, known=before.known + after.known)

    # --- by id ------------------------------------------------------------------------------------------------

    async def put(self, transactions: Sequence[BridgedTransaction], source: str = "") -> list[Item]:
        putting = _Putting(await self._server(), source, self._is_worker, self._not_passed, self._monotonic)
        for step in steps_of(transactions):
            for group, group_transactions in step.items():
                await putting.put(group, group_transactions)
        return [putting.items.get(t.id) or Item(t.id, 503, code="unavailable", detail=AWAY) for t in transactions]

    async def check_queues(self) -> None:
        try:
            await self._call("GET", "/v1/bridge/relay", b"")
            return
        except NotifyError as error:
            lacks_queues = error.code == WrongRole.code
            if not lacks_queues and not isinstance(error, Forbidden):
                raise
        if not lacks_queues:  # this relay may not use that route: the members' roles show whether there are queues
            members = (await self._members(self._http)).servers()
            address = urlsplit(self._http.url).netloc
            targets = [member for member in members if urlsplit(member.url).netloc == address] or members
            lacks_queues = bool(targets) and not any("queue" in member.roles for member in targets)
        if lacks_queues:
            raise WrongRole(
                f"the server at {self._http.url} has no queues, and would put messages into its database again: "
                "give --url the address of a queue server (`notify serve --roles queue --registry …`), or of Kafka"
            )

    async def show_refused(self, source: str, report: RefusedReport) -> None:
        await self._call("PUT", f"/v1/sources/{source}/refused", encode_msgpack(report))

    async def _call(self, method: str, path: str, body: bytes) -> bytes:
        return await (await self._server()).call(method, path, body, POST_SECONDS)

    async def _server(self) -> HttpClient:
        """The server's client; if the address is a port that several workers share, the first worker's client."""
        if not self._has_looked:
            url = self._http.url
            client = HttpClient(url)  # not kept: all requests of a connection go to the same worker
            try:
                members = await self._members(client)
            finally:
                client.close()
            is_one_port = len({urlsplit(member.url).netloc for member in members.servers()}) == 1
            if members.keys and is_one_port and url.rpartition("/")[2] not in members.keys:
                self._http.close()
                self._http = HttpClient(f"{url}/{members.keys[0]}")
            self._has_looked, self._is_worker = True, bool(members.keys)
        return self._http

    async def _members(self, http: HttpClient) -> Members:
        return read_answer(decode_members, await http.call("GET", "/v1/members", b"", POST_SECONDS))

    async def close(self) -> None:
        self._http.close()


class _Putting:
    """One call of `put`: the server's answers so far, and the transactions that wait because of them."""

    def __init__(
        self,
        http: HttpClient,
        source: str,
        is_worker: bool,
        not_passed: dict[str, tuple[float, Item]],
        monotonic: Callable[[], float],
    ) -> None:
        """`source`: the id of the transactions' database, or "". `is_worker`: whether the server is one of several
        workers. `not_passed`: the sink's transactions that a proxy did not pass on."""
        self._http = http
        self._source = source
        self._is_worker = is_worker
        self.items: dict[str, Item] = {}
        """The items by id; a transaction that was not sent because the server did not answer has no item."""
        self._held_back = HeldBack()
        self._not_passed = not_passed
        self._monotonic = monotonic
        self._is_away = False

    async def put(self, group: str, transactions: Sequence[BridgedTransaction]) -> None:
        """Put transactions of one producer group, one request after the other.

        A request that is refused because of its content, or that a proxy does not pass on, is sent again in halves,
        down to a single transaction. Raises Unavailable if the server has not answered for any transaction yet.
        """
        waiting = deque(self._encoded(transactions))
        most = REQUEST_ITEMS
        while waiting and not self._is_away:
            request = _cut(waiting, most, each_key_once=not group)
            looks = self._held_back or self._not_passed
            sent = [each for each in request if not self._is_held_back(each)] if looks else request
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
            except Unavailable as error:
                if not isinstance(error, ForeignAnswer) or not await self._http.is_reachable(LOOK_SECONDS):
                    if not self.items:
                        raise
                    self._is_away = True
                    return
                if len(sent) > 1:
                    most = len(sent) // 2
                    waiting.extendleft(reversed(sent))
                    continue
                items = [self._note_not_passed(sent[0][0].id, error)]
            most = min(2 * most, REQUEST_ITEMS)
            for (transaction, _), item in zip(sent, items, strict=True):
                item.id = transaction.id
                self.items[transaction.id] = item
                if is_for_now(item):
                    self._held_back.hold(transaction, topics=item.code == BACKLOG_FULL)

    def _encoded(self, transactions: Sequence[BridgedTransaction]) -> Iterator[Encoded]:
        """The transactions that fit into a request; the others get a refusing item."""
        for transaction in transactions:
            transaction_id = transaction.id
            try:
                encoded = _encoded(transaction)
            except InvalidRequest as error:
                self.items[transaction_id] = Item(transaction_id, error.status, code=error.code, detail=str(error))
                continue
            refused = _too_large(transaction_id, len(encoded), HEAD_BYTES)
            if refused is not None:
                self.items[transaction_id] = refused
                continue
            yield transaction, encoded

    def _note_not_passed(self, transaction_id: str, error: ForeignAnswer) -> Item:
        """The item of a transaction that a proxy does not pass on."""
        item = Item(transaction_id, error.status, code=error.code, detail=str(error))
        if len(self._not_passed) < NOT_PASSED_MOST:
            self._not_passed[transaction_id] = self._monotonic() + NOT_PASSED_SECONDS, item
        return item

    def _is_held_back(self, each: Encoded) -> bool:
        transaction = each[0]
        if self._not_passed and (noted := self._not_passed.get(transaction.id)) is not None:
            if self._monotonic() < noted[0]:
                self.items[transaction.id] = noted[1]
                self._held_back.hold(transaction)
                return True
            del self._not_passed[transaction.id]
        if not self._held_back.holds(transaction):
            return False
        detail = "an earlier transaction with the same key waits"
        self.items[transaction.id] = Item(transaction.id, 429, code=BEHIND, detail=detail)
        return True

    async def _post(self, group: str, transactions: Sequence[Encoded]) -> list[Item]:
        raws = [msgspec.Raw(encoded) for _, encoded in transactions]
        request: dict[str, Any]
        if group:
            path, request = "/v1/transactions", {"producer_group": group, "transactions": raws}
            if self._source:
                request["source"] = self._source
            item_ids = [t.id for t, _ in transactions]
        else:
            path, request = "/v1/messages", {"messages": raws}
            if self._is_worker:
                request["anywhere"] = True  # this worker takes the keys of all workers, so that order is kept
            item_ids = [_published_id(t) for t, _ in transactions]
        answer = await self._http.call("POST", path, encode_msgpack(request), POST_SECONDS)
        return items_for(item_ids, answer, self._http)


def _too_large(transaction_id: str, size: int, head_bytes: int) -> Item | None:
    """The item of a transaction of `size` bytes if it is too large for any request, else None."""
    most = LIMITS.request_bytes - head_bytes
    if size <= most:
        return None
    return Item(
        transaction_id,
        413,
        code="request_too_large",
        detail=f"the transaction has {size:,} bytes; {most:,} fit a request",
    )


def _fits_no_batch(transaction: BridgedTransaction) -> Item | None:
    """The item of a transaction that makes a server refuse its whole batch, else None."""
    encoded = encode_msgpack(transaction)
    try:
        _decode_transaction(encoded)
    except UNDECODABLE as error:
        return Item(transaction.id, 422, code="unreadable", detail=f"its row is not a message: {error}")
    return _too_large(transaction.id, len(encoded), BATCH_HEAD_BYTES)


def _parts(batch: PackedBridgeBatch) -> tuple[PackedBridgeBatch, PackedBridgeBatch] | None:
    """Two parts of a batch, the second with the position; None if there is no smaller part.

    Transactions of a batch that also decides earlier parts are prepared as another part, and decided with these.
    """
    transactions = batch.transactions
    replace = msgspec.structs.replace
    if transactions and (batch.commit or batch.rollback) and not batch.prepare:
        first = replace(
            batch, transactions=transactions, position=batch.expected_position, prepare=True, commit=[], rollback=[]
        )
        return first, replace(batch, transactions=[], commit=[*batch.commit, *[t.id for t in transactions]])
    if len(transactions) < 2 or batch.commit or batch.rollback:
        return None
    middle = len(transactions) // 2
    first = replace(batch, transactions=transactions[:middle], position=batch.expected_position)
    return first, replace(batch, transactions=transactions[middle:])


def _encoded(transaction: BridgedTransaction) -> bytes:
    """Encode a transaction for a request; a transaction without a producer group is one published message.

    Raises InvalidRequest if the transaction cannot be sent.
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
    """Remove the transactions of the next request from `waiting`, at least one.

    `each_key_once`: the route may accept a message although it refuses an earlier one with the same key for now.
    """
    request: list[Encoded] = []
    size = 0
    keys: set[tuple[str, str]] = set()
    while waiting and len(request) < most:
        transaction, encoded = waiting[0]
        size += len(encoded)
        if request and size > REQUEST_BYTES:
            break
        if each_key_once:
            if not keys.isdisjoint(keys_of(transaction)):
                break
            keys |= keys_of(transaction)
        request.append(waiting.popleft())
    return request
