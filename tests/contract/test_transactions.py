"""Promises of every storage about halves, outcomes and checks, tested on memory, the log, and the databases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.wire import decode_payload
from notify.server.jobs.deciding import act
from notify.server.metrics import Metrics
from notify.storage.checks import CheckAnswer
from notify.storage.records import NewTransaction, PartlyStored, Put, State
from tests.contract.stores import SECOND, T0, Bench, commit
from tests.support.transactions import content, message, sent


def test_a_half_is_not_delivered_until_it_is_committed(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        a, c = sent(b"a"), sent(b"c")
        assert [r.put for r in await b.store.put([a, c], T0)] == [Put.STORED, Put.STORED]
        await b.restart()
        assert await b.bodies() == []
        assert await b.store.states([a.id]) == [State.PREPARED]
        result = await b.store.decide([(c.id, "g", State.COMMITTED), (a.id, "g", State.ROLLED_BACK)], T0)
        assert [(r.found, r.changed, r.state) for r in result] == [
            (True, True, State.COMMITTED),
            (True, True, State.ROLLED_BACK),
        ]
        await b.restart()
        assert await b.bodies() == [b"c"]
        assert await b.store.states([a.id, c.id]) == [State.ROLLED_BACK, State.COMMITTED]

    transactions(scenario)


def test_an_outcome_is_written_once(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent()
        await commit(b.store, t)
        await b.restart()
        for outcome in (State.COMMITTED, State.ROLLED_BACK):
            result = (await b.store.decide([(t.id, "g", outcome)], T0))[0]
            assert (result.found, result.changed, result.state) == (True, False, State.COMMITTED)
        assert await b.bodies() == [b"x"]

    transactions(scenario)


def test_unknown_transactions_and_foreign_groups_change_nothing(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent()
        await b.store.put([t], T0)
        unknown, foreign = await b.store.decide(
            [(ids.new_id(), "g", State.COMMITTED), (t.id, "other", State.COMMITTED)], T0
        )
        assert not unknown.found and not unknown.foreign
        assert foreign.found and foreign.foreign and not foreign.changed
        assert await b.store.states([t.id]) == [State.PREPARED]

    transactions(scenario)


def test_a_transaction_stays_its_groups_when_it_is_decided(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        made, undone, at_once, unknown = sent(), sent(), sent(committed=True), ids.new_id()
        await b.store.put([made, undone, at_once], T0)
        await b.store.decide([(made.id, "g", State.COMMITTED), (undone.id, "g", State.ROLLED_BACK)], T0)
        for _ in range(3):
            for t, state in ((made, State.COMMITTED), (undone, State.ROLLED_BACK), (at_once, State.COMMITTED)):
                foreign, own, admins = await b.store.decide([(t.id, g, state) for g in ("other", "g", None)], T0)
                assert (foreign.found, foreign.foreign, foreign.changed) == (True, True, False)
                assert own == admins and (own.foreign, own.changed, own.state) == (False, False, state)
            all_of_them = [made.id, undone.id, at_once.id, unknown]
            assert await b.store.producer_groups(all_of_them) == ["g", "g", "g", None]
            await b.restart()

    transactions(scenario)


def test_an_answer_to_a_check_that_is_not_under_way_is_stale(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent()
        await b.store.put([t], T0)
        for token in (0, 1, 5):  # before any check
            assert (await b.store.decide([(t.id, "g", State.COMMITTED)], T0, tokens={t.id: token or 7}))[0].stale
        due = (await b.store.claim_checks("g", T0 + 5 * SECOND, 1, SECOND))[0]
        now = T0 + 6 * SECOND
        assert (await b.store.decide([(t.id, "g", State.COMMITTED)], now, tokens={t.id: due.token + 1}))[0].stale
        await b.store.answer_check(CheckAnswer(t.id, due.token, now, 1))
        # A token is stale after its answer, and after a restart that forgot it.
        assert (await b.store.decide([(t.id, "g", State.ROLLED_BACK)], now, tokens={t.id: due.token}))[0].stale
        await b.restart(now)
        assert (await b.store.decide([(t.id, "g", State.ROLLED_BACK)], now, tokens={t.id: due.token}))[0].stale
        assert await b.store.states([t.id]) == [State.PREPARED]
        again = (await b.store.claim_checks("g", now + SECOND, 1, SECOND))[0]
        assert (await b.store.decide([(t.id, "g", State.COMMITTED)], now, tokens={t.id: again.token}))[0].changed

    transactions(scenario)


def test_tokens_of_checks_cannot_be_guessed(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        halves = [sent() for _ in range(40)]
        await b.store.put(halves, T0)
        tokens = sorted(d.token for d in await b.store.claim_checks("g", T0 + 5 * SECOND, 40, 10 * SECOND))
        assert len(set(tokens)) == 40 and tokens[0] > 0 and tokens[-1] < 1 << 63
        # 40 random numbers of 62 bits are not near each other, nor near the time.
        assert min(after - before for before, after in zip(tokens, tokens[1:], strict=False)) > 1 << 20
        assert all(abs(token - T0) > 60 * SECOND for token in tokens)
        for t in halves:
            assert (await b.store.checking(t.id)).token in tokens

    transactions(scenario)


def test_the_same_id_again_is_the_same_transaction(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent(b"a")
        first = await b.store.put([t, t], T0)
        assert [r.put for r in first] == [Put.STORED, Put.ALREADY]
        await b.restart()
        other = NewTransaction(t.id, "g", [message(b"b")])
        stranger = NewTransaction(t.id, "h", [message(b"a")])
        assert [r.put for r in await b.store.put([t, other, stranger], T0)] == [Put.ALREADY, Put.IN_USE, Put.IN_USE]
        await b.store.decide([(t.id, "g", State.COMMITTED)], T0)
        await b.restart()
        again = await b.store.put([t, other], T0)
        assert [(r.put, r.state) for r in again] == [(Put.ALREADY, State.COMMITTED), (Put.IN_USE, State.COMMITTED)]
        assert await b.bodies() == [b"a"]

    transactions(scenario)


def test_a_value_that_a_storage_cannot_hold_refuses_only_its_transaction(transactions: Any) -> None:
    """A key with a NUL, which PostgreSQL cannot store, fails alone in a request and batch with others."""

    async def put(b: Bench, *halves: NewTransaction) -> list[Any]:
        try:
            return list(await b.store.put(halves, T0))
        except PartlyStored as partly:
            return list(partly.results)

    async def scenario(b: Bench) -> None:
        halves = [sent(str(n).encode(), key="a\x00b" if n == 3 else "k") for n in range(8)]
        results = await put(b, *halves)
        odd = results.pop(3)
        assert (odd.status, odd.code) == (422, "invalid_value") if isinstance(odd, InvalidRequest) else odd.put == 0
        assert [r.put for r in results] == [Put.STORED] * 7
        held = await b.store.states([t.id for t in halves])
        assert [state for n, state in enumerate(held) if n != 3] == [State.PREPARED] * 7
        # Alone in a request it is refused as an item, too.
        (alone,) = await put(b, sent(key="\x00"))
        assert type(alone) is type(odd)

    transactions(scenario)


def test_messages_of_a_transaction_keep_their_order_and_numbers(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = NewTransaction(ids.new_id(), "g", [message(str(n).encode()) for n in range(50)])
        await commit(b.store, t)
        await b.restart()
        messages = (await b.queues()).read("t", 0, 0, 100, 1 << 20)
        assert [(m.offset, m.message_no, m.payload) for m in messages] == [
            (n, n, message(str(n).encode()).payload) for n in range(50)
        ]
        assert {m.transaction_id for m in messages} == {t.id}

    transactions(scenario)


def test_a_transaction_that_comes_committed_is_in_the_queue_at_once(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent(b"a", committed=True)
        assert [(r.put, r.state) for r in await b.store.put([t], T0)] == [(Put.STORED, State.COMMITTED)]
        await b.restart()
        assert [r.put for r in await b.store.put([t], T0)] == [Put.ALREADY]
        assert await b.bodies() == [b"a"]
        assert [m.offset for m in (await b.queues()).messages(t.id)] == [0]

    transactions(scenario)


def test_a_decided_transaction_keeps_its_producer_group(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        done, undone, at_once = sent(group="a"), sent(group="b"), sent(group="c", committed=True)
        await b.store.put([done, undone, at_once], T0)
        await b.store.decide([(done.id, "a", State.COMMITTED), (undone.id, "b", State.ROLLED_BACK)], T0)
        for _ in range(2):
            for t in (done, undone, at_once):
                transaction = await b.store.transaction(t.id)
                assert transaction is not None and transaction.producer_group == t.producer_group
                foreign = NewTransaction(t.id, "other", t.messages, committed=t.committed)
                assert (await b.store.put([foreign], T0))[0].put == Put.IN_USE
                assert (await b.store.put([t], T0))[0].put == Put.ALREADY
            await b.restart()

    transactions(scenario)


def test_checks_are_claimed_once_and_fenced_by_their_token(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent(source="s", instance="i")
        await b.store.put([t], T0)
        assert await b.store.claim_checks("g", T0 + 4 * SECOND, 10, 10 * SECOND) == []
        due = await b.store.claim_checks("g", T0 + 5 * SECOND, 10, 10 * SECOND)
        assert [(d.id, d.source, d.instance, d.attempts, d.topics) for d in due] == [(t.id, "s", "i", 0, ("t",))]
        assert await b.store.claim_checks("g", T0 + 6 * SECOND, 10, 10 * SECOND) == []
        again = (await b.store.claim_checks("g", T0 + 15 * SECOND, 10, 10 * SECOND))[0]
        assert again.token != due[0].token
        now = T0 + 16 * SECOND
        assert not await b.store.answer_check(CheckAnswer(t.id, due[0].token, now, 1, False))
        assert await b.store.answer_check(CheckAnswer(t.id, again.token, now + 5 * SECOND, 1, False))
        assert not await b.store.answer_check(CheckAnswer(t.id, again.token, now, 2, False))
        await b.restart(now)
        assert (await b.store.checking(t.id))[1:] == (1, False, "g")
        third = (await b.store.claim_checks("g", now + 5 * SECOND, 10, 10 * SECOND))[0]
        assert third.token not in (again.token, due[0].token)
        assert await b.store.half_contents([third]) == [[content(b"x")]]

    transactions(scenario)


def test_a_list_of_what_is_undecided_has_bodies_up_to_a_bound(transactions: Any) -> None:
    """100 halves of 7 MiB in the console's list took gigabytes of memory."""

    async def scenario(b: Bench) -> None:
        halves = [sent(bytes(1000), key="k", tag="v") for _ in range(40)]
        for n, t in enumerate(halves):
            await b.store.put([t], T0 + n)
        for most, whole in ((None, 40), (1 << 20, 40), (10_500, 10), (0, 1)):
            found = await b.store.undecided(None, None, None, 40, most)
            assert [t.id for t in found] == [t.id for t in halves]
            payloads = [decode_payload(t.messages[0].payload) for t in found]
            assert all((p.topic, p.key, p.tag) == ("t", "k", "v") for p in payloads)
            kept = [len(p.body) for p in payloads]
            assert [t.without_bodies for t in found] == [False] * whole + [True] * (40 - whole)
            assert kept == [1000] * whole + [0] * (40 - whole)

    transactions(scenario)


def test_parked_transactions_stay_until_they_are_resolved(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent()
        await b.store.put([t], T0)
        due = (await b.store.claim_checks("g", T0 + 5 * SECOND, 1, SECOND))[0]
        await b.store.answer_check(CheckAnswer(t.id, due.token, T0 + 600 * SECOND, 15, True))
        await b.restart()
        assert await b.store.states([t.id]) == [State.PARKED]
        assert [x.id for x in await b.store.undecided(State.PARKED, "g", None, 10)] == [t.id]
        assert await b.store.undecided(State.PREPARED, None, None, 10) == []
        result = (await b.store.decide([(t.id, "g", State.COMMITTED)], T0))[0]
        assert result.changed
        assert await b.bodies() == [b"x"]

    transactions(scenario)


def test_an_operator_decides_several_at_once(transactions: Any) -> None:
    """One is parked, one was decided before, and one is not known: each has its own result."""

    async def scenario(b: Bench) -> None:
        core: Any = SimpleNamespace(store=b.store, clock=lambda: T0 + 700 * SECOND, metrics=Metrics())
        parked, fresh, before = sent(b"parked"), sent(b"fresh"), sent(b"before")
        await b.store.put([parked, fresh, before], T0)
        for due in await b.store.claim_checks("g", T0 + 5 * SECOND, 3, SECOND):
            if due.id == parked.id:
                await b.store.answer_check(CheckAnswer(due.id, due.token, T0 + 600 * SECOND, 15, True))
        await b.store.decide([(before.id, "g", State.ROLLED_BACK)], T0)
        names = [parked.id, fresh.id, before.id, ids.new_id()]
        checked = await act(core, "check", names)
        assert [item["status"] for item in checked] == [200, 200, 409, 404]
        assert await b.store.states(names[:2]) == [State.PREPARED, State.PREPARED]
        assert (await b.store.checking(parked.id)).attempts == 0
        for _ in range(2):  # a job that is repeated after a crash says the same
            items = await act(core, "commit", names)
            assert [item["status"] for item in items] == [200, 200, 409, 404]
        assert core.metrics.committed == 2
        assert sorted(await b.bodies()) == [b"fresh", b"parked"]

    transactions(scenario)


def test_a_resume_starts_checks_over_if_that_is_asked_for(transactions: Any) -> None:
    async def scenario(b: Bench) -> None:
        t = sent()
        await b.store.put([t], T0)
        due = (await b.store.claim_checks("g", T0 + 5 * SECOND, 1, SECOND))[0]
        await b.store.answer_check(CheckAnswer(t.id, due.token, T0 + 600 * SECOND, 15, True))
        assert await b.store.resume_checks(t.id, T0 + 6 * SECOND, reset=False)
        assert (await b.store.checking(t.id))[1:] == (15, True, "g")
        assert len(await b.store.claim_checks("g", T0 + 6 * SECOND, 1, SECOND)) == 1
        assert await b.store.resume_checks(t.id, T0 + 7 * SECOND, reset=True)
        await b.restart()
        assert (await b.store.checking(t.id))[1:] == (0, False, "g")
        assert len(await b.store.claim_checks("g", T0 + 7 * SECOND, 1, SECOND)) == 1
        assert not await b.store.resume_checks(ids.new_id(), T0, reset=True)

    transactions(scenario)


def test_a_forced_decision_is_shown(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        committed, rolled_back, own = sent(delay_us=SECOND), sent(), sent()
        await b.store.put([committed, rolled_back, own], T0)
        await b.store.decide([(committed.id, None, State.COMMITTED)], T0, forced=True)
        await b.store.decide([(rolled_back.id, None, State.ROLLED_BACK)], T0, forced=True)
        await b.store.decide([(own.id, "g", State.COMMITTED)], T0)
        b.store.release_due(T0 + 2 * SECOND, 10)
        await b.store.sync()
        for restarted in (False, True):
            if restarted:
                await b.restart()
            shown = [await b.store.transaction(t.id) for t in (committed, rolled_back, own)]
            assert [t.forced for t in shown if t is not None] == [True, True, False]

    run(scenario)
