"""Several databases as one storage: each transaction is in one of them; a database that fails is left out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import structlog
from sqlalchemy.engine import Engine

from notify.errors import InvalidRequest, NotifyError, StorageFailed, Unavailable
from notify.protocol.wire import Payload
from notify.runtime import faults
from notify.storage.checks import CheckAnswer, Checking, Due
from notify.storage.groups import Subscription
from notify.storage.records import (
    Decided,
    InDoubt,
    NewTransaction,
    PartlyDecided,
    PartlyStored,
    PutResult,
    State,
    Transaction,
)
from notify.storage.sql import key_map
from notify.storage.sql.key_map import KeyMap
from notify.storage.sql.placing import Placing
from notify.storage.sql.store import DatabaseAway, SqlStore
from notify.storage.sql.undecided import sum_of
from notify.storage.topics import Topic
from notify.storage.transactions import NO_SHARDS, NO_TOKENS, without_bodies_beyond

log = structlog.get_logger("notify.sql")

PROBE_SECONDS = 1.0
MAY_KNOW = "a database does not answer, and may be the one that knows; try again"

T = TypeVar("T")


class SqlShards:
    """Transactions without a key go to a database that answers, chosen by id; others to the database of their key.

    A transaction whose key's database is unreachable is refused (retryable), because elsewhere its order would be lost.
    """

    def __init__(self, stores: Sequence[SqlStore]) -> None:
        """Raises InvalidRequest if two shards have the same name."""
        self.by_name = {store.shard: store for store in stores}
        if len(self.by_name) != len(stores):
            raise InvalidRequest("--storage: two databases have the same shard name")
        self._only = stores[0] if len(stores) == 1 else None
        self._placing = placing = Placing(self.by_name)
        self._opened: set[str] = set()
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._probed: dict[str, float] = {}
        self.wait_for_map = placing.wait_for_map
        self.follow = placing.follow
        self.shard_of = placing.shard_of

    @property
    def key_map(self) -> KeyMap:
        """The version of the map that this server follows."""
        return self._placing.key_map

    @property
    def first(self) -> SqlStore:
        """The shard that has the registry."""
        return self.by_name[min(self.by_name)]

    async def open(self, now_us: int) -> None:
        """Open every database that answers. Raises StorageFailed if one is unsuitable, or none answers."""
        failures = []
        for store in self.by_name.values():
            try:
                await store.open(now_us)
                self._opened.add(store.shard)
            except DatabaseAway as error:
                failures.append(str(error))
                log.error("shard_left_out", shard=store.shard, reason=str(error))
        if not self._opened:
            raise StorageFailed("no database answers: " + "; ".join(failures))

    def check_registry(self) -> None:
        """Raises StorageFailed if a new shard would become the registry because it is the first by name.

        Servers that do not know that shard would keep using another registry, and keys would be in two places.
        """
        in_use = self._in_use()
        first = self.first.shard
        others = [name for name, is_in_use in in_use.items() if is_in_use]
        if others and in_use.get(first) is False:
            raise StorageFailed(
                f"shard {first!r} is new, and the first by name: it would take the place of {others[0]!r}, which is in "
                f"use, as the registry. Name it so that it sorts after {others[0]!r}, or give --registry the URL of "
                f"{others[0]!r}"
            )

    def first_map(self) -> list[str]:
        """The shards of the first key map: if other servers may already be sending, only those that they use."""
        in_use = self._in_use()
        known = [name for name in self._placing.names if in_use.get(name, True)]
        return known if any(in_use.values()) else list(self._placing.names)

    def _in_use(self) -> dict[str, bool]:
        """Whether servers have used each database that answers, by its shard's name. Blocks."""
        in_use = {}
        for name in sorted(self._opened):
            with self.by_name[name].engine.connect() as connection:
                in_use[name] = key_map.is_in_use(connection)
        return in_use

    async def stored_bodies(self, after: str) -> tuple[set[str], str]:
        """See NamesBodies: one database after another. A place is a shard's name and the place there."""
        names = sorted(self.by_name)
        shard, _, place = after.partition("/")
        if not after:
            shard = names[0]
        if shard not in self.by_name:
            raise InvalidRequest(f"after is {after[:80]!r}: it must be a value of an earlier answer", "invalid_query")
        if shard not in self._opened:
            raise Unavailable(f"shard {shard!r} is unreachable, and may name bodies that no other does")
        found, following = await self.by_name[shard].stored_bodies(place)
        if following:
            return found, f"{shard}/{following}"
        rest = names[names.index(shard) + 1 :]
        return found, f"{rest[0]}/" if rest else ""

    async def close(self) -> None:
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        for name in self._opened:
            await self.by_name[name].close()

    def shards(self) -> Sequence[str]:
        return tuple(self.by_name)

    def topics(self) -> list[Topic]:
        return self.first.topics()

    def topic(self, name: str) -> Topic | None:
        return self.first.topic(name)

    def has_topic(self, name: str) -> bool:
        return self.first.has_topic(name)

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        self.first.create_topic_soon(topic)

    # --- which of them ----------------------------------------------------------------------------------------

    def healthy(self) -> list[SqlStore]:
        """The shards that answer, as far as is known."""
        return [s for s in self.by_name.values() if s.shard in self._opened and not s.writer.failing_since]

    def _at(self, shard: str) -> SqlStore:
        """The shard of that name. Raises Unavailable while it does not answer."""
        store = self.by_name.get(shard)
        if store is None or shard not in self._opened:
            raise Unavailable(f"shard {shard!r} does not answer; try again")
        return store

    @property
    def engines(self) -> dict[str, Engine]:
        """The databases by the names of their shards."""
        return {name: store.engine for name, store in self.by_name.items()}

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        placing = self._placing
        by_map = placing.begin()
        try:
            if self._only is not None and placing.is_alone(by_map):
                return await self._only.put(transactions, now_us)
            return await self._put_by(by_map, transactions, now_us)
        finally:
            placing.end(by_map)

    async def _put_by(self, by_map: KeyMap, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        """Send each transaction to its shard, by this version of the map."""
        healthy = [store.shard for store in self.healthy()]
        by_shard: dict[str, list[int]] = {}
        results: list[PutResult | NotifyError | None] = [None] * len(transactions)
        for i, t in enumerate(transactions):
            try:
                shard = self._placing.shard_by(t, by_map) or self._placing.place_of(t.id, healthy)
            except Unavailable as error:
                results[i] = error
            else:
                by_shard.setdefault(shard, []).append(i)
        places = list(by_shard.values())
        calls = [self._put_at(shard, [transactions[i] for i in some], now_us) for shard, some in by_shard.items()]
        answers = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        for some, stored in zip(places, answers, strict=True):
            for i, result in zip(some, stored, strict=True):
                results[i] = result
        stored_ones = [result for result in results if isinstance(result, PutResult)]
        if len(stored_ones) == len(results):
            return stored_ones
        failed = [result for result in results if isinstance(result, NotifyError)]
        if stored_ones or not all(error.retryable for error in failed):
            raise PartlyStored([result for result in results if result is not None])
        raise failed[0]

    async def _put_at(
        self, shard: str, transactions: Sequence[NewTransaction], now_us: int
    ) -> Sequence[PutResult | NotifyError]:
        """The result for each transaction; an error concerns only its own."""
        try:
            return await self._at(shard).put(transactions, now_us)
        except PartlyStored as partly:
            return partly.results
        except NotifyError as error:
            return [error] * len(transactions)

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        if self._only is not None:
            return await self._only.decide(outcomes, now_us, forced, tokens)
        by_shard: dict[str, list[int]] = {}
        for place, outcome in enumerate(outcomes):
            shard = shards.get(outcome[0])
            for name in (shard,) if shard is not None else self.by_name:
                by_shard.setdefault(name, []).append(place)
        # All shards at the same time, so that a slow or unreachable one does not delay the others.
        answers = await asyncio.gather(
            *[
                self._decide_at(shard, [outcomes[place] for place in places], now_us, forced, tokens)
                for shard, places in by_shard.items()
            ]
        )
        return one_answer_each(len(outcomes), zip(by_shard.values(), answers, strict=True))

    async def _decide_at(
        self,
        shard: str,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool,
        tokens: Mapping[bytes, int],
    ) -> Sequence[Decided | NotifyError]:
        """The result for each transaction; an error is that of its shard."""
        try:
            return await self._at(shard).decide(outcomes, now_us, forced, tokens)
        except NotifyError as error:
            return [error] * len(outcomes)

    async def _each(self, ask: Callable[[SqlStore], Awaitable[T]]) -> list[T]:
        """The answers of the shards that answer. Raises Unavailable if none does."""
        found: list[T] = []
        failed: NotifyError | None = None
        for store in self.healthy():
            try:
                found.append(await ask(store))
            except Unavailable as error:
                failed = error
        if not found:
            raise failed or Unavailable("no database answers; try again")
        return found

    async def _first(self, ask: Callable[[SqlStore], Awaitable[T | None]]) -> T | None:
        """The first answer that is not None. Raises Unavailable if there is none and a shard is unreachable."""
        answers = await self._each(ask)
        answer = next((a for a in answers if a is not None), None)
        if answer is None and len(answers) < len(self.by_name):
            raise Unavailable(MAY_KNOW)
        return answer

    async def _all(self, ask: Callable[[SqlStore], Awaitable[T]]) -> list[T]:
        """The answers of all shards. Raises Unavailable if one does not answer, even if it did a moment ago: it may be
        the one that knows."""
        answers = await self._each(ask)
        if len(answers) < len(self.by_name):
            raise Unavailable(MAY_KNOW)
        return answers

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        answers = await self._all(lambda store: store.states(ids))
        return [next((s for s in states if s is not None), None) for states in zip(*answers, strict=True)]

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        answers = await self._all(lambda store: store.producer_groups(ids))
        return [next((g for g in groups if g is not None), None) for groups in zip(*answers, strict=True)]

    # --- checks -----------------------------------------------------------------------------------------------

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        claimed: list[Due] = []
        for store in self.healthy():
            # An unreachable shard is asked for its rows when it is back.
            with contextlib.suppress(Unavailable):
                claimed += await store.claim_checks(producer_group, now_us, limit - len(claimed), answer_within_us)
        return claimed

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        for name, checks in _by_shard(claimed).items():
            await self._at(name).release_checks(checks, due_us)

    async def answer_check(self, answer: CheckAnswer) -> bool:
        for name in (answer.shard,) if answer.shard is not None else self.by_name:
            if await self._at(name).answer_check(answer):
                return True
        return False

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        if shard is not None:
            return await self._at(shard).checking(transaction_id)
        return await self._first(lambda s: s.checking(transaction_id))

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, reset: bool) -> bool:
        async def resumed(store: SqlStore) -> bool | None:
            return await store.resume_checks(transaction_id, now_us, reset=reset) or None

        return await self._first(resumed) is not None

    async def half_contents(self, claimed: Sequence[Due]) -> list[list[Payload]]:
        contents: dict[tuple[str, bytes], list[Payload]] = {}
        for name, some in _by_shard(claimed).items():
            for due, messages in zip(some, await self._at(name).half_contents(some), strict=True):
                contents[(name, due.id)] = messages
        return [contents[(due.shard, due.id)] for due in claimed]

    def tend(self, now_us: int) -> None:
        """Check whether a database that was left out answers again."""
        for store in self.by_name.values():
            out = store.shard not in self._opened or store.writer.failing_since
            task = self._probing.get(store.shard)
            if not out or (task is not None and not task.done()):
                continue
            if time.monotonic() - self._probed.get(store.shard, 0.0) > PROBE_SECONDS:
                self._probed[store.shard] = time.monotonic()
                self._probing[store.shard] = asyncio.get_running_loop().create_task(self._probe(store, now_us))

    async def _probe(self, store: SqlStore, now_us: int) -> None:
        try:
            if store.shard not in self._opened:
                await store.open(now_us)
                self._opened.add(store.shard)
            else:
                await store.probe()
        except NotifyError as error:
            log.debug("shard_still_away", shard=store.shard, reason=str(error))
        except Exception:
            faults.unexpected("shard_not_looked_at", shard=store.shard)
        else:
            log.info("shard_back", shard=store.shard)

    def next_check_us(self, producer_group: str) -> int | None:
        return min([store.next_check_us(producer_group) or 0 for store in self.healthy()], default=None)

    # --- for the administrator --------------------------------------------------------------------------------

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        return await self._first(lambda s: s.transaction(transaction_id))

    async def in_doubt(self) -> InDoubt:
        return sum_of(await self._each(lambda s: s.in_doubt()))

    async def undecided(
        self,
        state: State | None,
        producer_group: str | None,
        older_than_us: int | None,
        limit: int,
        most_bytes: int | None = None,
    ) -> list[Transaction]:
        answers = await self._each(lambda s: s.undecided(state, producer_group, older_than_us, limit, most_bytes))
        oldest = sorted((t for found in answers for t in found), key=lambda t: t.stored_us)[:limit]
        return without_bodies_beyond(oldest, most_bytes)

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        for store in self.by_name.values():
            store.keep(retention_us, retention_bytes)

    async def retain(self, now_us: int) -> int:
        return sum(await self._each(lambda s: s.retain(now_us)))


def _by_shard(claimed: Sequence[Due]) -> dict[str, list[Due]]:
    found: dict[str, list[Due]] = {}
    for due in claimed:
        found.setdefault(due.shard, []).append(due)
    return found


def open_storage(text: str, shard: str, *, retention_us: int, writers: int) -> SqlShards:
    """The shards that `--storage` names: one URL, or several `name=URL` with spaces between. Raises InvalidRequest."""
    stores = []
    parts = text.split()
    for part in parts:
        name, found, url = part.partition("=")
        if not found or "/" in name:
            if len(parts) > 1:
                raise InvalidRequest("--storage: with several databases each needs its shard's name: a=URL b=URL")
            name, url = shard, part
        stores.append(SqlStore(url, name, retention_us=retention_us, writers=writers))
    if not stores:
        raise InvalidRequest("--storage is empty: give a URL such as postgresql://user:password@host/database")
    return SqlShards(stores)


Answer = Decided | NotifyError
"""A shard's answer to an outcome; an error: the shard is unreachable, or refuses."""


def one_answer_each(count: int, answers: Iterable[tuple[Sequence[int], Sequence[Answer]]]) -> list[Decided]:
    """Combine the shards' answers to `count` outcomes. Each shard got some of them, by their places.

    Raises PartlyDecided with the answers if one of them is an error.
    """
    best: dict[int, Answer] = {}
    for places, some in answers:
        for place, answer in zip(places, some, strict=True):
            if _says_more(answer, best.get(place)):
                best[place] = answer
    in_order = [best[place] for place in range(count)]
    decided = [answer for answer in in_order if isinstance(answer, Decided)]
    if len(decided) < count:
        raise PartlyDecided(in_order)
    return decided


def _says_more(answer: Answer, before: Answer | None) -> bool:
    """Whether an answer counts more than another shard's: a shard that has the transaction comes first, then one that
    may have it."""
    if before is None:
        return True
    if isinstance(answer, NotifyError):
        return isinstance(before, Decided) and not before.found
    return answer.found
