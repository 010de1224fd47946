"""LeftSender: sends what a producer group in mode `auto` has left behind, once the server is back.

The processes of the group run one, and so do `notify check`, relays and bridges (notify/movers/left_behind.py). It
stores the half that the server did not store before the commit, names its shard in the rows, and then sends the
outcome: each step may be repeated, by this process or by another one. Outcomes of earlier transactions that have not
reached the server go first, also those of other processes, and transactions go in the order of their rows, so that the
order per key is kept. If the server takes a transaction later only, those with a key of it wait, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import sqlalchemy as sa

from notify.client.producer.left_behind import COMMIT_SECONDS, LeftBehind, Origin, may_be_left, means_away
from notify.client.producer.transactions import NOT_NOW, TransactionClient
from notify.client.tables import left_rows
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import WITHOUT_INDEX, with_left_behind_index
from notify.client.tables.left_rows import Key, Look, Page
from notify.client.tables.outbox import Place
from notify.errors import Forbidden, NotFound, NotifyError, TransactionRefused, Unavailable, UnsafeTable
from notify.protocol.wire import BridgedTransaction, Item, LeftBehindReport
from notify.runtime.backoff import Backoff
from notify.runtime.databases import is_lost, reason_of
from notify.runtime.program_log import program_log

log = program_log("notify.client")

LOOK_SECONDS = 10.0
"""How often a process looks for what others of its group have left behind."""
KEYS_SECONDS = 2.0
"""How often it reads the keys of all that waits, if that is more than one look finds."""
SCHEMAS_SECONDS = 60.0
"""How often it looks for schemas that it has not met."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 0.1, 1.0
TURN_SECONDS, TURN_MAX_SECONDS = 0.25, 2.0
"""How long a process leaves the rows to another one that sends the same."""
PAGE_TRANSACTIONS, PAGE_BYTES = 100, 8 << 20
"""The most transactions, and bytes of bodies, that are sent together: their outcomes are one request, in order."""
PROBE_SECONDS = 2.0
REPORT_SECONDS = 10.0
"""How often a process reports to the server what waits."""
MOST_KNOWN = 200_000
"""The most transactions that are remembered because the server has their outcome. Others may be sent once more."""
ROLLED_BACK = "the server has recorded ROLLBACK for it, although its transaction is committed"


class SendsAgain(Protocol):
    """Sends outcomes that did not reach the server (`Running`)."""

    async def send_again(self) -> bool:
        """Send them in order; whether all have reached it."""
        ...


class LeftSender:
    """Sends for one producer. Belongs to one event loop."""

    def __init__(
        self,
        group: str,
        left_behind: LeftBehind,
        database: DatabaseCalls,
        schemas: Callable[[], Sequence[str]],
        outcomes: SendsAgain,
        client: Callable[[], TransactionClient],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`schemas`: the schemas that the producer has met. `client`: makes a client, which this one closes."""
        self._group = group
        self._left_behind = left_behind
        self._database = database
        self._schemas = schemas
        self._outcomes = outcomes
        self._make_client = client
        self._monotonic = monotonic
        self._client: TransactionClient | None = None
        self._looked_for_schemas = self._looked_for_keys = float("-inf")
        self._looks: dict[str, Look] = {}
        """The last look at each schema where something waits."""
        self._awake = asyncio.Event()
        self._backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        self._turns = Backoff(TURN_SECONDS, TURN_MAX_SECONDS)
        self._is_overtaken = False
        """Whether another process has sent some of what the last look found, in each schema."""
        self._complaint = ""
        self._without_index: list[str] = []
        """The schemas whose table lacks the index for what is left behind, at the last look."""
        self._elsewhere: set[Origin] = set()
        """Where this process left transactions behind that its own connections did not reach at the last look."""
        self.sent = self.refused = 0
        """How many transactions the server has stored, and how many it refuses permanently."""
        self._logged = self._times_away = 0
        self._known: set[str] = set()
        """Transactions whose outcome the server has, as long as something waits."""
        self._reported: dict[str, tuple[str, float]] = {}
        """By schema: the id of its source, and when it was last reported that something waits there."""
        self._may_report = True
        loop = asyncio.get_running_loop()
        left_behind.on_change = lambda: _wake(loop, self._awake)

    def wake(self) -> None:
        """Look now."""
        self._awake.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self._awake.clear()
            try:
                wait = await self.step()
            except (NotifyError, sa.exc.SQLAlchemyError, OSError) as error:
                wait = self._backoff.next()
                self._complain(error)
            except Exception:
                wait = RETRY_MAX_SECONDS
                log.exception("what group %s left behind was not sent; again in %g s", self._group, wait)
            if self._is_overtaken:
                await asyncio.sleep(wait)  # commits that leave rows do not shorten it
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._awake.wait()

    async def step(self) -> float:
        """Send what waits, up to the bounds of a look; returns the seconds until the next step: 0 if more may wait.
        Raises errors of the server and the database, also if the server takes some of it later only.

        Where another process sends the same rows, this one leaves them to it for a moment: all would get in each
        other's way, and the server would get everything from each.
        """
        self._is_overtaken = False
        left_behind = self._left_behind
        self._times_away = left_behind.times_away
        if left_behind.is_away:
            await self._reach()
        decided, began = left_behind.decided(), self._monotonic()
        found = await self._look()
        if all(look.are_new for look in found.values()):
            keys = frozenset[Key]().union(*(look.keys for look in found.values()))
            left_behind.looked(keys, are_all=all(look.are_all for look in found.values()), began=began)
        if not found:
            left_behind.back(self._times_away)
        await self._report(found)
        reason: NotifyError | None = None
        are_overtaken = []
        for schema, look in found.items():
            reason = await self._send(schema, look) or reason
            are_overtaken.append(self._is_overtaken)
            if reason is not None and means_away(reason):
                left_behind.away()
                break
        await self._forget_decided(decided)
        if reason is not None:
            raise reason
        self._backoff.reset()
        self._is_overtaken = bool(found) and all(are_overtaken)
        if self._is_overtaken:
            left_behind.back(self._times_away)
            return self._turns.next()
        self._turns.reset()
        if found:
            return 0.0
        self._known = set()
        if self.sent > self._logged:
            log.info("%d transactions that group %s had left behind are sent", self.sent - self._logged, self._group)
            self._logged = self.sent
        self._complaint = ""
        if left_behind.is_away:  # something failed since this step began
            return RETRY_SECONDS
        return COMMIT_SECONDS / 5 if left_behind.ids() else LOOK_SECONDS

    async def _reach(self) -> None:
        """Reach the server, and let it have the outcomes of earlier transactions. Raises Unavailable."""
        try:
            await self._opened_client().http.refresh(PROBE_SECONDS)
        except Unavailable:
            raise
        except NotifyError as error:  # it answers: let it refuse the commits themselves
            log.warning("the server refuses to list its members: %s", error)
        if not await self._outcomes.send_again():
            raise Unavailable("outcomes of earlier transactions do not reach the server")

    async def _look(self) -> dict[str, Look]:
        """The rows that wait in each schema where something does."""
        if self._monotonic() - self._looked_for_schemas > SCHEMAS_SECONDS:
            await self._database.look()
            self._looked_for_schemas = self._monotonic()
            await self._warn_of_missing_indexes(self._schemas())
        schemas = self._schemas()
        if len(schemas) > 1:
            schemas = await self._database.call(left_rows.with_waiting, schemas, schema=schemas[0])
        found: dict[str, Look] = {}
        if self._monotonic() - self._looked_for_keys > KEYS_SECONDS:
            self._looks, self._looked_for_keys = {}, self._monotonic()
        for schema in schemas:
            try:
                before = self._looks.get(schema)
                found[schema] = await self._database.call(left_rows.look, self._group, before, schema=schema)
            except sa.exc.DBAPIError as error:
                if len(schemas) == 1 or is_lost(error):
                    raise
                log.warning("what was left behind in the schema %s cannot be read: %s", schema, reason_of(error))
        self._looks = {schema: look for schema, look in found.items() if look.places}
        return self._looks

    async def _warn_of_missing_indexes(self, schemas: Sequence[str]) -> None:
        if not schemas:
            return
        indexed = await self._database.call(with_left_behind_index, schemas, schema=schemas[0])
        missing = [schema for schema in schemas if schema not in indexed]
        if missing and missing != self._without_index:
            log.warning("schema %s: %s", ", ".join(missing[:3]), WITHOUT_INDEX)
        self._without_index = missing

    async def _forget_decided(self, decided: Mapping[Origin, Sequence[str]]) -> None:
        """Forget transactions that had committed before the look, and do not wait: another process has sent them. Only
        the database that got their rows can tell: an engine may lead to several."""
        elsewhere: set[Origin] = set()
        for origin, names in decided.items():
            names = names[: left_rows.MOST_LOOKED_AT]
            try:
                call = self._database.call(left_rows.waiting_of, names, origin.source, schema=origin.schema)
                waiting = await call
            except sa.exc.DBAPIError as error:
                if is_lost(error):
                    raise
                waiting = None
            if waiting is None:
                elsewhere.add(origin)
            else:
                self._left_behind.forget(name for name in names if name not in waiting)
        for origin in sorted(elsewhere - self._elsewhere)[:3]:
            log.warning(
                "what group %s left behind in the schema %s of source %s waits, because this producer's own "
                "connections lead to another database: make an engine and a producer for each database, or run "
                "`notify check` for that one",
                self._group, origin.schema, origin.source,
            )  # fmt: skip
        self._elsewhere = elsewhere

    async def _report(self, schemas: Collection[str]) -> None:
        """Let the server show what waits in these schemas, every REPORT_SECONDS, and that nothing waits any more in
        others."""
        try:
            for schema in schemas if self._may_report else ():
                if self._monotonic() - self._reported.get(schema, ("", float("-inf")))[1] > REPORT_SECONDS:
                    report = await self._database.call(left_rows.report, self._group, schema=schema)
                    self._reported[schema] = report.source, self._monotonic()
                    await self._opened_client().report_left_behind(report, PROBE_SECONDS)
            for schema in self._reported.keys() - schemas if self._may_report else ():
                report = LeftBehindReport(self._group, self._reported[schema][0], 0)
                await self._opened_client().report_left_behind(report, PROBE_SECONDS)
                del self._reported[schema]
        except (NotFound, Forbidden) as error:  # an older server has no such route
            self._may_report = False
            log.info("the server will not show what group %s leaves behind: %s", self._group, error)
        except NotifyError as error:
            log.info("the server was not told what group %s has left behind: %s", self._group, error)

    # --- sending ----------------------------------------------------------------------------------------------

    async def _send(self, schema: str, look: Look) -> NotifyError | None:
        """Send transactions in order; the reason if the server takes some of them later only."""
        held = _Held()
        await self._repeat_earlier(schema, look, held)
        if held.reason is not None and means_away(held.reason):
            return held.reason
        for names in _pages(look.places):
            page: Page = await self._database.call(left_rows.read, names, schema=schema)
            self._is_overtaken = len(page.transactions) + len(page.unreadable) < len(names)
            if not self._is_overtaken:
                await self._send_page(schema, page, held)
            if self._is_overtaken or (held.reason is not None and means_away(held.reason)):
                break
        return held.reason

    async def _repeat_earlier(self, schema: str, look: Look, held: _Held) -> None:
        """Send the outcomes of transactions with the same keys that committed just before, also by other processes."""
        found = await self._database.call(left_rows.earlier, self._group, look, schema=schema)
        earlier = [each for each in found if each.id not in self._known]
        client = self._opened_client()
        for begin in range(0, len(earlier), PAGE_TRANSACTIONS):
            # One request after the other: concurrent ones may overtake each other.
            part = earlier[begin : begin + PAGE_TRANSACTIONS]
            futures = [client.outcome_soon(each.id, each.shard or None, "COMMIT") for each in part]
            for each, future in zip(part, await _ended(futures), strict=True):
                item = _result(future)
                if isinstance(item, NotifyError):
                    held.hold(each.keys, item)
                elif item.status in NOT_NOW:
                    held.hold(each.keys, Unavailable(f"{item.detail} ({item.code})"))
                else:  # the server has it, or never will: it was rolled back, or its shard has lost it
                    self._know([each.id])

    def _know(self, transaction_ids: Sequence[str]) -> None:
        if len(self._known) > MOST_KNOWN:
            self._known = set()
        self._known.update(transaction_ids)

    async def _send_page(self, schema: str, page: Page, held: _Held) -> None:
        refused = dict.fromkeys(page.unreadable, "its rows are not a message")
        stored = await self._store_halves(page, held, refused)
        if stored:
            shard_by_id = await self._database.call(left_rows.name_shards, stored, schema=schema)
        else:
            shard_by_id = {}
        shard_by_id |= {each.id: shard for each, shard in page.transactions if shard}
        sent, lost = await self._commit(page, shard_by_id, held, refused)
        if lost:
            await self._database.call(left_rows.unname_shards, lost, schema=schema)
        if sent or refused:
            are_mine = await self._database.call(left_rows.note, sent, list(refused), schema=schema)
            self._is_overtaken = not are_mine
        for name, why in refused.items():
            log.error("%s was left behind, and the server refuses it: %s; see `notify refused`", name, why)
        self._know(sent)
        self.sent += len(sent)
        self.refused += len(refused)
        self._left_behind.forget([*sent, *refused])
        if held.reason is None or not means_away(held.reason):
            self._left_behind.back(self._times_away)

    async def _store_halves(self, page: Page, held: _Held, refused: dict[str, str]) -> dict[str, str]:
        """Store the halves of transactions without a shard; the shard of each stored one."""
        client = self._opened_client()
        halves = [each for each, shard in page.transactions if not shard]
        futures = [client.half_soon(each.id, each.messages, page.source) for each in halves]
        stored = {}
        for transaction, future in zip(halves, await _ended(futures), strict=True):
            item = _result(future)
            if isinstance(item, NotifyError):
                if not may_be_left(item) and item.status not in (401, 403):
                    refused[transaction.id] = f"{item} ({item.code})"
                    continue
                held.hold(_keys_of(transaction), item)
            elif item.status not in (200, 201):
                error = TransactionRefused(f"{item.detail} ({item.code})", item.code, item.status)
                if item.status in NOT_NOW or item.status in (429, 507):
                    held.hold(_keys_of(transaction), error)
                else:
                    refused[transaction.id] = str(error)
            elif item.state == "ROLLED_BACK":
                refused[transaction.id] = ROLLED_BACK
            else:
                stored[transaction.id] = item.shard or ""
        return stored

    async def _commit(
        self, page: Page, shard_by_id: dict[str, str], held: _Held, refused: dict[str, str]
    ) -> tuple[list[str], list[str]]:
        """Send outcomes in order: the ids that the server has, and those that their shard has lost."""
        client = self._opened_client()
        ready = []
        for transaction, _ in page.transactions:
            if transaction.id in refused or transaction.id not in shard_by_id:
                continue
            if not held.holds(transaction):
                ready.append(transaction)
        futures = [client.outcome_soon(each.id, shard_by_id[each.id] or None, "COMMIT") for each in ready]
        sent, lost = [], []
        for transaction, future in zip(ready, await _ended(futures), strict=True):
            item = _result(future)
            if isinstance(item, NotifyError):
                held.hold(_keys_of(transaction), item)
            elif item.status == 200:
                sent.append(transaction.id)
            elif item.status == 404:
                lost.append(transaction.id)
                held.hold(
                    _keys_of(transaction), Unavailable(f"shard {shard_by_id[transaction.id]} has lost {transaction.id}")
                )
            elif item.status == 409:
                refused[transaction.id] = ROLLED_BACK if item.state == "ROLLED_BACK" else f"{item.detail} ({item.code})"
            else:
                held.hold(_keys_of(transaction), Unavailable(f"{item.detail} ({item.code})"))
        return sent, lost

    def _opened_client(self) -> TransactionClient:
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def _complain(self, error: Exception) -> None:
        """Log why nothing is sent, once for each reason."""
        why = reason_of(error)
        if isinstance(error, UnsafeTable) or not isinstance(error, sa.exc.SQLAlchemyError) or not is_lost(error):
            kind = type(error).__name__
        else:
            kind = "the database"
        if kind != self._complaint:
            self._complaint = kind
            log.warning("messages that group %s left behind wait in the database: %s", self._group, why)

    async def close(self) -> None:
        """Close the connections; `run` is cancelled already."""
        self._left_behind.on_change = None
        await self._database.close()
        if self._client is not None:
            await self._client.close(0.0)

    def close_now(self) -> None:
        """Cut the connections, without waiting."""
        if self._client is not None:
            self._client.close_now()


class _Held:
    """The keys of transactions that the server takes later only, and the first reason."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self.reason: NotifyError | None = None

    def hold(self, keys: Collection[Key], reason: NotifyError) -> None:
        self._keys.update(keys)
        self.reason = self.reason or reason

    def holds(self, transaction: BridgedTransaction) -> bool:
        """Whether a transaction waits for an earlier one; those behind it then wait, too."""
        keys = _keys_of(transaction)
        if self._keys.isdisjoint(keys):
            return False
        self._keys |= keys
        return True


def _keys_of(transaction: BridgedTransaction) -> set[Key]:
    return {(message.topic, message.key) for message in transaction.messages if message.key is not None}


def _pages(places: Sequence[Place]) -> list[list[str]]:
    """The ids of transactions in pages of bounded size."""
    pages: list[list[str]] = [[]]
    size = 0
    for place in places:
        if pages[-1] and (len(pages[-1]) == PAGE_TRANSACTIONS or size + place.size > PAGE_BYTES):
            pages.append([])
            size = 0
        pages[-1].append(place.id)
        size += place.size
    return pages


async def _ended(futures: Sequence[asyncio.Future[Item]]) -> Sequence[asyncio.Future[Item]]:
    if futures:
        await asyncio.wait(futures)
    return futures


def _result(future: asyncio.Future[Item]) -> Item | NotifyError:
    """The item, or the error of the whole request."""
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, NotifyError) else Unavailable(str(error))


def _wake(loop: asyncio.AbstractEventLoop, awake: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(awake.set)
