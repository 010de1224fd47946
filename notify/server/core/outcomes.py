"""Records the outcomes of halves, which producers report or answer to checks, and tells transactions' states."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from notify.check.schedule import CheckSchedule
from notify.errors import InvalidId, InvalidRequest, NotifyError
from notify.protocol import ids
from notify.protocol.limits import check_count, check_name, digits
from notify.protocol.wire import Item, OutcomeItem
from notify.runtime.clock import Clock
from notify.server.core.admission import failed
from notify.server.core.check_log import CheckLog
from notify.server.metrics import Metrics
from notify.storage.capabilities import shard_names
from notify.storage.checks import CheckAnswer
from notify.storage.records import STATE_NAMES, Decided, PartlyDecided, State
from notify.storage.transactions import NO_SHARDS, NO_TOKENS, TransactionStore

_OUTCOMES = {"COMMIT": State.COMMITTED, "ROLLBACK": State.ROLLED_BACK, "UNKNOWN": None}
UNKNOWN = "no transaction by this id is known here"
AT_ONCE = 16
"""How many UNKNOWN outcomes of a request are looked up at a time: one by one, their waits for the disk or the database
would add up; all together, they would hold up the lookups of other requests."""
_LATER = Item("", 0)
"""The placeholder for the item of an UNKNOWN, until the decisions of its request are recorded."""


class Outcomes:
    """Records outcomes item by item, on any storage. All I/O is the storage's."""

    def __init__(
        self,
        store: TransactionStore,
        clock: Clock,
        *,
        shard: str,
        schedule: CheckSchedule,
        metrics: Metrics,
        check_log: CheckLog,
        jitter: random.Random | None = None,
    ) -> None:
        """`check_log` records the answers to checks; `jitter` spreads checks that would come due together."""
        self.schedule = schedule
        self._store = store
        self._clock = clock
        self._shards = shard_names(store, shard)
        self._metrics = metrics
        self._check_log = check_log
        self._jitter = jitter or random.Random()

    async def record(self, group: str, outcomes: Sequence[OutcomeItem]) -> list[Item]:
        """Record outcomes, some of which may answer checks; the items are in the order of the outcomes."""
        check_name("producer_group", group)
        check_count(outcomes)
        items: list[Item | None] = []
        decisions: list[tuple[bytes, str | None, State]] = []
        answers: dict[int, int] = {}
        """The token of the check that a decision answers, by the decision's index."""
        shards: dict[int, str] = {}
        """The shard that a decision names, by the decision's index, if this server has several."""
        unknown: dict[int, bytes] = {}
        """The transaction id of each UNKNOWN, by its index in the request."""
        own_shards = self._shards
        several = len(own_shards) > 1
        transaction_ids = ids.from_texts([o.id for o in outcomes])
        for number, o in enumerate(outcomes):
            try:
                if o.outcome not in _OUTCOMES:
                    raise InvalidRequest(
                        f"outcome {o.outcome[:20]!r} is not COMMIT, ROLLBACK or UNKNOWN", "invalid_outcome"
                    )
                transaction_id = transaction_ids[number]
                if isinstance(transaction_id, InvalidId):
                    raise transaction_id
            except NotifyError as error:
                items.append(failed(o.id, error))
                continue
            if o.shard is not None and o.shard not in own_shards:
                detail = f"this is shard {', '.join(own_shards)}; send the outcome to {o.shard[:60]!r}"
                items.append(Item(o.id, 421, code="wrong_shard", detail=detail))
                continue
            wanted = _OUTCOMES[o.outcome]
            if wanted is None:
                unknown[len(items)] = transaction_id
                items.append(_LATER)
            else:
                if several and o.shard is not None:
                    shards[len(decisions)] = o.shard
                if o.check is not None:
                    answers[len(decisions)] = _token(o.check)
                decisions.append((transaction_id, group, wanted))
                items.append(None)
        results = await self._decide(decisions, answers, shards) if decisions else ()
        answered = self._answered(group, outcomes, items, iter(results))
        places = list(unknown)
        for first in range(0, len(places), AT_ONCE):
            chunk = places[first : first + AT_ONCE]
            calls = [self._unknown_or_failed(unknown[place], group, outcomes[place]) for place in chunk]
            for place, item in zip(chunk, await asyncio.gather(*calls), strict=True):
                answered[place] = item
        return answered

    def _answered(
        self,
        group: str,
        outcomes: Sequence[OutcomeItem],
        refused: list[Item | None],
        results: Iterator[Decided | NotifyError],
    ) -> list[Item]:
        """The item for each outcome: why it was refused, or the storage's result."""
        answered: list[Item] = []
        metrics = self._metrics
        committed = State.COMMITTED
        for o, item in zip(outcomes, refused, strict=True):
            if item is None:
                result = next(results)
                if isinstance(result, NotifyError):
                    answered.append(failed(o.id, result))
                    continue
                if o.check is not None and result.found and not (result.foreign or result.stale):
                    self._answered_check(ids.from_text(o.id), group, self._clock(), o.outcome, o.reason)
                if result.changed:
                    if result.state is committed:
                        metrics.committed += 1
                    else:
                        metrics.rolled_back += 1
                    item = Item(o.id, 200, STATE_NAMES[result.state])
                elif not result.found:
                    item = Item(o.id, 404, code="unknown_transaction", detail=UNKNOWN)
                elif result.foreign:
                    item = _foreign(o.id)
                elif result.stale:
                    item = _stale_check(o, result.state)
                elif result.state == _OUTCOMES[o.outcome]:
                    item = Item(o.id, 200, STATE_NAMES[result.state])
                else:
                    metrics.conflicts += 1
                    detail = f"{result.state.name} is already recorded, and final"
                    item = Item(o.id, 409, result.state.name, code="outcome_conflict", detail=detail)
            answered.append(item)
        return answered

    async def _decide(
        self,
        decisions: Sequence[tuple[bytes, str | None, State]],
        answers: Mapping[int, int],
        shards: Mapping[int, str],
    ) -> Sequence[Decided | NotifyError]:
        """The result of each decision, or the error for which this one was not recorded.

        `answers` and `shards` have, by a decision's index, the check's token that it answers, and the shard it names.
        """
        if not (answers or shards):
            return await self._decide_at_once(decisions, NO_TOKENS, NO_SHARDS)
        # A storage takes one token and one shard for each id. An id may have several outcomes, each with a token or
        # shard: a producer's outcome and its answer to a check came in one request, or a half is on two shards. So the
        # second outcomes of ids are decided after the first ones, and so on.
        rounds: list[list[int]] = []
        """The indexes of the first outcome of each id, then of the second ones, and so on."""
        seen: Counter[bytes] = Counter()
        for place, decision in enumerate(decisions):
            if seen[decision[0]] == len(rounds):
                rounds.append([])
            rounds[seen[decision[0]]].append(place)
            seen[decision[0]] += 1
        results: dict[int, Decided | NotifyError] = {}
        for round_places in rounds:
            decided = await self._decide_at_once(
                [decisions[n] for n in round_places],
                {decisions[n][0]: answers[n] for n in round_places if n in answers},
                {decisions[n][0]: shards[n] for n in round_places if n in shards},
            )
            results.update(zip(round_places, decided, strict=True))
        return [results[place] for place in range(len(decisions))]

    async def _decide_at_once(
        self,
        decisions: Sequence[tuple[bytes, str | None, State]],
        tokens: Mapping[bytes, int],
        places: Mapping[bytes, str],
    ) -> Sequence[Decided | NotifyError]:
        try:
            return await self._store.decide(decisions, self._clock(), tokens=tokens, shards=places)
        except PartlyDecided as partly:
            return partly.results
        except NotifyError as error:
            return [error] * len(decisions)

    async def _unknown_or_failed(self, transaction_id: bytes, group: str, o: OutcomeItem) -> Item:
        """As `_unknown`; the storage's error becomes the item's."""
        try:
            return await self._unknown(transaction_id, group, o)
        except NotifyError as error:
            return failed(o.id, error)

    async def _unknown(self, transaction_id: bytes, group: str, o: OutcomeItem) -> Item:
        """Record UNKNOWN. If it answers the current check, it counts as an attempt, unless it is `unavailable`."""
        checking = await self._store.checking(transaction_id, o.shard)
        if checking is None:
            return (await self._states(group, {o.id: transaction_id}))[o.id]
        token, attempts, parked, owner = checking
        if (owner or group) != group:
            return _foreign(o.id)
        state = State.PARKED if parked else State.PREPARED
        if o.check is None:
            return Item(o.id, 200, state.name)
        if not token or token != _token(o.check):
            return _stale_check(o, state)
        attempts += not o.unavailable
        park = parked or attempts >= self.schedule.attempts
        now_us = self._clock()
        next_us = now_us + self.schedule.delay_us(attempts, park, self._jitter)
        if not await self._store.answer_check(CheckAnswer(transaction_id, token, next_us, attempts, park, o.shard)):
            return _stale_check(o, state)
        self._answered_check(transaction_id, group, now_us, "unavailable" if o.unavailable else "UNKNOWN", o.reason)
        if o.unavailable:
            self._metrics.checks_unavailable += 1
        else:
            self._metrics.checks_unknown += 1
        self._metrics.parked += park and not parked
        return Item(o.id, 200, (State.PARKED if park else State.PREPARED).name)

    def _answered_check(self, transaction_id: bytes, group: str, now_us: int, answer: str, reason: str | None) -> None:
        """Note the answer to a check, and how long it took."""
        asked = self._check_log.asked(transaction_id)
        if asked is not None:
            check_back = self._metrics.latencies["check_back"].of(group)
            check_back.add(now_us - asked.at_us)
            check_back.exemplify(now_us - asked.at_us, now_us, lambda: asked.trace_id)
        self._check_log.add(transaction_id, now_us, answer, reason=reason or "")

    async def states(self, group: str, texts: Sequence[str]) -> list[Item]:
        """The state of each transaction of a producer group, in the order of `texts`, their ids."""
        check_name("producer_group", group)
        check_count(texts)
        parsed: dict[str, bytes] = {}
        items: dict[str, Item] = {}
        for text, transaction_id in zip(texts, ids.from_texts(texts), strict=True):
            if isinstance(transaction_id, InvalidId):
                items[text] = failed(text, transaction_id)
            else:
                parsed[text] = transaction_id
        items |= await self._states(group, parsed)
        return [items[text] for text in texts]

    async def _states(self, group: str, parsed: Mapping[str, bytes]) -> dict[str, Item]:
        """The item of each id. It tells no state of a transaction of another producer group."""
        if not parsed:
            return {}
        wanted = list(parsed.values())
        states, owners = await self._store.states(wanted), await self._store.producer_groups(wanted)
        items: dict[str, Item] = {}
        for text, state, owner in zip(parsed, states, owners, strict=True):
            if state is None:
                items[text] = Item(text, 404, code="unknown_transaction", detail=UNKNOWN)
            elif owner is not None and owner != group:
                items[text] = _foreign(text)
            else:
                items[text] = Item(text, 200, state.name)
        return items


def _token(text: str) -> int:
    """The token of a check that `text` writes; -1, which no check has, if it writes none."""
    token = digits(text)
    return -1 if token is None else token


def _foreign(text: str) -> Item:
    """The item for a transaction of another producer group, without its state."""
    return Item(text, 409, code="id_in_use", detail="the transaction belongs to another producer group")


def _stale_check(o: OutcomeItem, state: State) -> Item:
    detail = "this check is not under way: it was answered, or asked again; only the answer to the latest one counts"
    return Item(o.id, 410, state.name, code="stale_check", detail=detail)
