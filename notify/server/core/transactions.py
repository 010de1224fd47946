"""The transactions role: halves and outcomes item by item, on any storage. No I/O of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from notify import ids, tracing
from notify.check.schedule import CheckSchedule
from notify.clock import Clock
from notify.errors import InvalidRequest, NotifyError
from notify.limits import LIMITS, check_between, check_message, check_name
from notify.server.access import Principal
from notify.server.core.check_log import CheckLog
from notify.server.core.flow import HOLD_SECONDS, Flow, retry_after
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.capabilities import shard_names
from notify.storage.checks import CheckAnswer
from notify.storage.records import Decided, NewMessage, NewTransaction, PartlyStored, Put, PutResult, State
from notify.storage.topics import Flush
from notify.storage.transactions import TransactionStore
from notify.wire import (
    Item,
    JsonMessage,
    JsonMessages,
    JsonTransactions,
    OutcomeItem,
    PackedMessage,
    PackedMessages,
    PackedTransactions,
)

_OUTCOMES = {"COMMIT": State.COMMITTED, "ROLLBACK": State.ROLLED_BACK, "UNKNOWN": None}
UNKNOWN = "no transaction by this id is known here"
HOLD_US = round(HOLD_SECONDS * 1_000_000)
_FLUSH = {flush: flush.name.lower() for flush in Flush}


def failed(item_id: str, error: NotifyError, state: str | None = None) -> Item:
    """The item of a batch that an error refuses."""
    return Item(item_id, error.status, state, code=error.code, detail=str(error), retry_after=retry_after(error))


class Transactions:
    """Stores halves, records outcomes, publishes messages without a transaction."""

    def __init__(
        self,
        store: TransactionStore,
        clock: Clock,
        topics: Topics,
        *,
        shard: str,
        schedule: CheckSchedule,
        metrics: Metrics,
        flow: Flow,
        check_log: CheckLog,
        jitter: random.Random | None = None,
        with_spans: bool = False,
    ) -> None:
        """`check_log` keeps what was answered; `with_spans`: add spans to the traces that messages carry."""
        self.store = store
        self.clock = clock
        self.shard = shard
        self.shards = shard_names(store, shard)
        self._topics = topics
        self.schedule = schedule
        self._jitter = jitter or random.Random()
        self.metrics = metrics
        self._flow = flow
        self._gates = flow.gates
        self._check_log = check_log
        self._with_spans = with_spans

    # --- halves -----------------------------------------------------------------------------------------------

    async def put(
        self, request: JsonTransactions | PackedTransactions, principal: Principal | None = None
    ) -> list[Item]:
        """Durable halves (or committed transactions), item by item in request order.

        `principal`: who sends them, and may do so to some topics.
        """
        group, source, instance = request.producer_group, request.source or "", request.instance or ""
        check_name("producer_group", group)
        _check_text("source", source)
        _check_text("instance", instance)
        _check_count(request.transactions)
        now_us = self.clock()
        items: list[Item | None] = []
        accepted: list[NewTransaction] = []
        has_topic = self.store.has_topic
        gates, flow = self._gates, self._flow
        hold_until_us = now_us + HOLD_US
        bound = None if principal is None or principal.rights is None else principal
        for t in request.transactions:
            try:
                messages: Sequence[JsonMessage | PackedMessage] = t.messages
                if not 0 < len(messages) <= LIMITS.messages_per_transaction:
                    raise InvalidRequest(
                        f"a transaction carries 1 to {LIMITS.messages_per_transaction} messages, not {len(messages)}",
                        "out_of_bounds",
                    )
                transaction_id = _parse_id(t.id)
                check_after_us = 5_000_000
                if t.check_after is not None:
                    check_between(
                        "check_after", t.check_after, LIMITS.check_after_min_seconds, LIMITS.check_after_max_seconds
                    )
                    check_after_us = round(t.check_after * 1_000_000)
                new = []
                flow.check_group(group)
                for m in messages:
                    if bound is not None:
                        bound.check("publish", m.topic)
                    if not has_topic(m.topic):
                        self._topics.use(m.topic)
                    payload, delay_us, deliver_at_us, ttl_us = check_message(m, now_us)
                    if gates and (gate := gates.get(m.topic)) is not None:
                        await flow.check(gate, hold_until_us)
                    new.append(NewMessage(m.topic, payload, m.key, m.tag, delay_us, deliver_at_us, ttl_us))
            except NotifyError as error:
                items.append(failed(t.id, error))
            else:
                accepted.append(
                    NewTransaction(transaction_id, group, new, source, instance, check_after_us, t.committed)
                )
                items.append(None)
        if not accepted:
            return [item for item in items if item is not None]
        results = iter(await self._stored_or_refused(accepted, now_us))
        answered: list[Item] = []
        stored = 0
        for name, item in zip([t.id for t in request.transactions], items, strict=True):
            if item is None:
                result = next(results)
                if isinstance(result, NotifyError):
                    item = failed(name, result)
                elif result.put == Put.STORED:
                    stored += 1
                    item = Item(name, 201, result.state.name, result.shard or self.shard, _FLUSH[result.flush])
                elif result.put == Put.ALREADY:
                    item = Item(name, 200, result.state.name, result.shard or self.shard, _FLUSH[result.flush])
                else:
                    # It may be another producer group's, which is not told how that one stands.
                    detail = "the id belongs to another transaction: other content, or another producer group"
                    item = Item(name, 409, code="id_in_use", detail=detail)
            answered.append(item)
        self.metrics.halves += stored
        if self._with_spans:
            for t in request.transactions:
                for m in t.messages:
                    if m.headers is None or tracing.HEADER not in m.headers:
                        continue
                    tracing.record("half", m.topic, m.headers, now_us, self.clock(), **{"notify.transaction": t.id})
        return answered

    async def _stored_or_refused(
        self, accepted: list[NewTransaction], now_us: int
    ) -> Sequence[PutResult | NotifyError]:
        """Results of the storage; where it refuses for a while (full disk), that refusal for each."""
        try:
            return await self.store.put(accepted, now_us)
        except PartlyStored as partly:
            return partly.results
        except NotifyError as error:
            if not error.retryable:
                raise
            return [error] * len(accepted)

    # --- messages without a transaction -----------------------------------------------------------------------

    async def publish(self, request: JsonMessages | PackedMessages, principal: Principal | None = None) -> list[Item]:
        """Messages committed at once; each is a transaction of its own. `principal`: as in `put`."""
        _check_count(request.messages)
        now_us = self.clock()
        items: list[Item | None] = []
        accepted: list[NewTransaction] = []
        names: list[str] = []
        has_topic = self.store.has_topic
        gates, flow = self._gates, self._flow
        hold_until_us = now_us + HOLD_US
        bound = None if principal is None or principal.rights is None else principal
        for m in request.messages:
            name = m.id or ""
            try:
                transaction_id, number = _parse_message_id(m.id) if m.id is not None else (ids.new_id(), 0)
                if number:
                    raise InvalidRequest("a message without a transaction has the number 0", "invalid_id")
                name = ids.message_id(transaction_id, 0)
                if bound is not None:
                    bound.check("publish", m.topic)
                if not has_topic(m.topic):
                    self._topics.use(m.topic)
                payload, delay_us, deliver_at_us, ttl_us = check_message(m, now_us)
                if gates and (gate := gates.get(m.topic)) is not None:
                    await flow.check(gate, hold_until_us)
            except NotifyError as error:
                items.append(failed(name, error))
            else:
                new = [NewMessage(m.topic, payload, m.key, m.tag, delay_us, deliver_at_us, ttl_us)]
                accepted.append(NewTransaction(transaction_id, "", new, committed=True))
                items.append(None)
            names.append(name)
        results = iter(await self._stored_or_refused(accepted, now_us) if accepted else [])
        answered: list[Item] = []
        for name, item in zip(names, items, strict=True):
            if item is None:
                result = next(results)
                if isinstance(result, NotifyError):
                    item = failed(name, result)
                elif result.put == Put.IN_USE:
                    item = Item(name, 409, code="id_in_use", detail="the id is used already")
                else:
                    status = 201 if result.put == Put.STORED else 200
                    self.metrics.published += status == 201
                    item = Item(name, status, "COMMITTED", result.shard or self.shard, _FLUSH[result.flush])
            answered.append(item)
        return answered

    # --- outcomes ---------------------------------------------------------------------------------------------

    async def outcomes(self, group: str, outcomes: Sequence[OutcomeItem]) -> list[Item]:
        """Record outcomes; answers to checks among them."""
        check_name("producer_group", group)
        _check_count(outcomes)
        items: list[Item | None] = []
        decisions: list[tuple[bytes, str | None, State]] = []
        answers: list[int | None] = []
        """For each decision the token of the check that it answers, None where it answers none."""
        shards: dict[bytes, str] = {}
        several = len(self.shards) > 1
        for o in outcomes:
            try:
                if o.outcome not in _OUTCOMES:
                    raise InvalidRequest(
                        f"outcome {o.outcome[:20]!r} is not COMMIT, ROLLBACK or UNKNOWN", "invalid_outcome"
                    )
                transaction_id = _parse_id(o.id)
            except NotifyError as error:
                items.append(failed(o.id, error))
                continue
            if o.shard is not None and o.shard not in self.shards:
                detail = f"this is shard {', '.join(self.shards)}; send the outcome to {o.shard[:60]!r}"
                items.append(Item(o.id, 421, code="wrong_shard", detail=detail))
                continue
            wanted = _OUTCOMES[o.outcome]
            if wanted is None:
                items.append(await self._unknown(transaction_id, group, o))
            else:
                if o.shard is not None and several:
                    shards[transaction_id] = o.shard
                answers.append(None if o.check is None else _token(o.check))
                decisions.append((transaction_id, group, wanted))
                items.append(None)
        if None not in items:
            return [item for item in items if item is not None]
        try:
            results = iter(await self._decide(decisions, answers, shards))
        except NotifyError as error:
            if not error.retryable:
                raise
            return [item if item is not None else failed(o.id, error) for o, item in zip(outcomes, items, strict=True)]
        answered: list[Item] = []
        metrics = self.metrics
        for o, item in zip(outcomes, items, strict=True):
            if item is None:
                result = next(results)
                if o.check is not None and result.found and not (result.foreign or result.stale):
                    self._check_log.add(ids.from_text(o.id), self.clock(), o.outcome, reason=o.reason or "")
                if not result.found:
                    item = Item(o.id, 404, code="unknown_transaction", detail=UNKNOWN)
                elif result.foreign:
                    item = _foreign(o.id)
                elif result.stale:
                    item = _stale_check(o, result.state)
                elif result.changed:
                    if result.state == State.COMMITTED:
                        metrics.committed += 1
                    else:
                        metrics.rolled_back += 1
                    item = Item(o.id, 200, result.state.name)
                elif result.state == _OUTCOMES[o.outcome]:
                    item = Item(o.id, 200, result.state.name)
                else:
                    metrics.conflicts += 1
                    detail = f"{result.state.name} is recorded already and stays"
                    item = Item(o.id, 409, result.state.name, code="outcome_conflict", detail=detail)
            answered.append(item)
        return answered

    async def _decide(
        self,
        decisions: Sequence[tuple[bytes, str | None, State]],
        answers: Sequence[int | None],
        shards: Mapping[bytes, str],
    ) -> Sequence[Decided]:
        tokens = {d[0]: token for d, token in zip(decisions, answers, strict=True) if token is not None}
        if not tokens or len({d[0] for d in decisions}) == len(decisions):
            return await self.store.decide(decisions, self.clock(), tokens=tokens, shards=shards)
        # A storage takes one token for each id. Here an id has several outcomes, and a token is one of them's only: a
        # producer's outcome and its answer to a check leave in one request.
        results: list[Decided] = []
        for decision, token in zip(decisions, answers, strict=True):
            own = {} if token is None else {decision[0]: token}
            results += await self.store.decide([decision], self.clock(), tokens=own, shards=shards)
        return results

    async def _unknown(self, transaction_id: bytes, group: str, o: OutcomeItem) -> Item:
        """UNKNOWN decides nothing. As the answer to the current check it counts, unless it was `unavailable`."""
        checking = await self.store.checking(transaction_id, o.shard)
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
        what = "unavailable" if o.unavailable else "UNKNOWN"
        self._check_log.add(transaction_id, self.clock(), what, reason=o.reason or "")
        if not o.unavailable:
            attempts += 1
            self.metrics.checks_answered += 1
        else:
            self.metrics.checks_unavailable += 1
        park = parked or attempts >= self.schedule.attempts
        self.metrics.parked += park and not parked
        now_us = self.clock()
        next_us = now_us + self.schedule.delay_us(attempts, park, self._jitter)
        try:
            if not await self.store.answer_check(CheckAnswer(transaction_id, token, next_us, attempts, park, o.shard)):
                return _stale_check(o, state)
        except NotifyError as error:
            if not error.retryable:
                raise
            return failed(o.id, error)
        return Item(o.id, 200, (State.PARKED if park else State.PREPARED).name)

    async def states(self, group: str, texts: Sequence[str]) -> list[Item]:
        """How transactions of a producer group stand."""
        check_name("producer_group", group)
        _check_count(texts)
        parsed: dict[str, bytes] = {}
        items: dict[str, Item] = {}
        for text in texts:
            try:
                parsed[text] = _parse_id(text)
            except InvalidRequest as error:
                items[text] = failed(text, error)
        items |= await self._states(group, parsed)
        return [items[text] for text in texts]

    async def _states(self, group: str, parsed: Mapping[str, bytes]) -> dict[str, Item]:
        """The item of each id. Another producer group's is said to be one, and nothing more."""
        if not parsed:
            return {}
        wanted = list(parsed.values())
        states, owners = await self.store.states(wanted), await self.store.producer_groups(wanted)
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
    """The token that a check's text stands for; what is none, stands for one that never was."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def _foreign(text: str) -> Item:
    """Whose transaction it is not is not told how it stands."""
    return Item(text, 409, code="id_in_use", detail="the transaction belongs to another producer group")


def _stale_check(o: OutcomeItem, state: State) -> Item:
    detail = "this check is not under way: it was answered, or asked again; only the answer to the latest one counts"
    return Item(o.id, 410, state.name, code="stale_check", detail=detail)


def _parse_id(text: str) -> bytes:
    try:
        return ids.from_text(text)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_id") from None


def _parse_message_id(text: str) -> tuple[bytes, int]:
    try:
        return ids.parse_message_id(text)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_id") from None


def _check_count(items: Sequence[object]) -> None:
    if not 0 < len(items) <= LIMITS.items:
        raise InvalidRequest(f"a request carries 1 to {LIMITS.items} items, this one {len(items)}", "out_of_bounds")


def _check_text(what: str, text: str) -> None:
    if len(text) > 255:
        raise InvalidRequest(f"{what} has {len(text)} characters; at most 255 are allowed", "out_of_bounds")
