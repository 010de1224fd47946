"""Withdrawals of delayed messages, on memory and on the log: a message is delivered or withdrawn, never both."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from notify.protocol import ids
from notify.protocol.withdrawal import ANY_TOPIC, Fate
from notify.storage.log import LogStore, times
from notify.storage.records import NewTransaction, State
from notify.storage.topics import Topic
from notify.storage.withdrawals import MOST_UNKNOWN, WAIT_US, Standing
from tests.contract.stores import SECOND, T0, Bench, bodies, commit
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import message, sent
from tests.support.withdrawals import fate, release, wanting, withdrawing

DUE = T0 + 100 * SECOND


def opened(directory: Path, segment_bytes: int = 1 << 20) -> LogStore:
    return LogStore(directory, segment_bytes=segment_bytes, disk=UnsyncedDisk(directory))


def later(body: bytes = b"later", due_us: int = DUE, **options: Any) -> NewTransaction:
    return sent(body, deliver_at_us=due_us, **options)


def test_a_message_in_time_is_never_delivered(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        kept, dropped = later(b"kept"), later(b"dropped")
        await commit(b.store, kept, dropped)
        cancel = withdrawing(dropped.id)
        await b.store.put([cancel], T0)
        await b.restart()
        assert fate(b, cancel) is None and b.store.delayed() == 2
        await b.store.decide([(cancel.id, "g", State.COMMITTED)], T0 + SECOND)
        assert b.store.delayed() == 1
        standing = b.store.withdrawable(dropped.id, 0)
        assert (standing.topic, standing.standing, standing.due_us) == ("t", Standing.WITHDRAWN, DUE)
        for _ in range(2):
            await b.restart()
            assert fate(b, cancel) is Fate.WITHDRAWN and b.store.delayed() == 1
            assert await b.store.states([dropped.id, cancel.id]) == [State.COMMITTED] * 2
        await release(b)
        await b.restart()
        await release(b)
        assert bodies(b.store) == [b"kept"] and b.store.delayed() == 0
        assert b.store.withdrawable(kept.id, 0).standing is Standing.RELEASED

    run(scenario)


def test_a_replacement_is_delivered_in_its_place(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        first = later(b"first")
        await commit(b.store, first)
        second = withdrawing(first.id, by=b"second", deliver_at_us=DUE - SECOND)
        await commit(b.store, second)
        await b.restart()
        third = withdrawing(second.id, by=b"third")
        late = withdrawing(first.id, by=b"late")
        await commit(b.store, third, late)
        await b.restart()
        assert [fate(b, t) for t in (second, third, late)] == [Fate.WITHDRAWN, Fate.WITHDRAWN, Fate.ALREADY]
        await release(b)
        await b.restart()
        assert bodies(b.store) == [b"third"]

    run(scenario)


def test_a_withdrawal_after_the_release_comes_too_late(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        due, at_once = later(b"due"), sent(b"at once")
        await commit(b.store, due, at_once)
        cancels = [withdrawing(due.id), withdrawing(at_once.id), withdrawing(due.id, by=b"instead")]
        await release(b)
        await b.restart()
        await commit(b.store, *cancels, at=DUE + SECOND)
        await b.restart()
        assert [fate(b, t) for t in cancels] == [Fate.TOO_LATE] * 3
        assert bodies(b.store) == [b"at once", b"due"]
        assert b.store.withdrawals()[Fate.TOO_LATE] == (3 if b.kind == "memory" else 0)  # since it was opened

    run(scenario)


def test_a_rollback_withdraws_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        kept = later()
        await commit(b.store, kept)
        cancel = withdrawing(kept.id)
        await b.store.put([cancel], T0)
        await b.restart()
        await b.store.decide([(cancel.id, "g", State.ROLLED_BACK)], T0)
        await b.restart()
        assert fate(b, cancel) is None and b.store.withdrawal(cancel.id, 0, T0).rolled_back
        await release(b)
        assert bodies(b.store) == [b"later"]

    run(scenario)


@pytest.mark.parametrize("outcome", [State.COMMITTED, State.ROLLED_BACK])
def test_an_undecided_message_is_waited_for(run: Any, outcome: State) -> None:
    async def scenario(b: Bench) -> None:
        target = later()
        await b.store.put([target], T0)
        cancel, again = withdrawing(target.id), withdrawing(target.id, by=b"instead")
        await commit(b.store, cancel, again)
        assert b.store.withdrawable(target.id, 0).standing is Standing.UNDECIDED
        for _ in range(2):
            await b.restart()
            assert [fate(b, t) for t in (cancel, again)] == [Fate.WAITING, Fate.ALREADY]
        await b.store.decide([(target.id, "g", outcome)], T0 + SECOND)
        await b.restart()
        assert fate(b, cancel) is (Fate.WITHDRAWN if outcome is State.COMMITTED else Fate.NOT_FOUND)
        await release(b)
        assert bodies(b.store) == []

    run(scenario)


@pytest.mark.parametrize("committed", [False, True])
def test_a_withdrawal_may_come_before_its_message(run: Any, committed: bool) -> None:
    """A relay or several databases bring them in any order."""

    async def scenario(b: Bench) -> None:
        target = later(committed=True)
        replace = withdrawing(target.id, by=b"instead", committed=committed)
        await (b.store.put([replace], T0) if committed else commit(b.store, replace))
        await b.restart()
        assert fate(b, replace) is Fate.WAITING and bodies(b.store) == []
        await b.store.put([target], T0 + SECOND)
        await b.restart()
        assert fate(b, replace) is Fate.WITHDRAWN and bodies(b.store) == [b"instead"]
        await release(b)
        assert bodies(b.store) == [b"instead"]
        [again] = await b.store.put([target], T0 + SECOND)
        assert again.put.name == "ALREADY"

    run(scenario)


def test_one_that_waited_too_long_does_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        now_us = T0 + WAIT_US + SECOND
        target = later(due_us=now_us + SECOND, committed=True)
        cancel = withdrawing(target.id)
        await commit(b.store, cancel)
        await b.restart()
        assert fate(b, cancel, now_us=T0 + WAIT_US) is Fate.WAITING
        await b.store.put([target], now_us)
        await b.restart()
        assert fate(b, cancel, now_us=now_us) is Fate.NOT_FOUND
        await release(b, now_us + 2 * SECOND)
        assert bodies(b.store) == [b"later"]

    run(scenario)


def test_a_withdrawal_names_the_topic_or_the_one_for_all(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        for name in ("other", ANY_TOPIC):
            await b.store.create_topic(Topic(name))
        kept, dropped, undecided = later(b"kept"), later(b"dropped"), later(b"undecided")
        await commit(b.store, kept, dropped)
        await b.store.put([undecided], T0)
        foreign, anywhere = withdrawing(kept.id, topic="other"), withdrawing(dropped.id, topic=ANY_TOPIC)
        of_undecided = withdrawing(undecided.id, topic="other")
        await commit(b.store, foreign, anywhere, of_undecided)
        await b.store.decide([(undecided.id, "g", State.COMMITTED)], T0)
        await b.restart()
        fates = [fate(b, t) for t in (foreign, anywhere, of_undecided)]
        assert fates == [Fate.NOT_FOUND, Fate.WITHDRAWN, Fate.NOT_FOUND]
        await release(b)
        assert sorted(bodies(b.store)) == [b"kept", b"undecided"]

    run(scenario)


def test_within_one_transaction_and_one_request(run: Any) -> None:
    """Messages of the transaction itself, before and after the withdrawal, and of others of the same request."""

    async def scenario(b: Bench) -> None:
        own_id = ids.new_id()
        own = NewTransaction(
            own_id,
            "g",
            [
                message(b"a", deliver_at_us=DUE),
                wanting(own_id, 0),
                wanting(own_id, 3),
                message(b"b", deliver_at_us=DUE),
                message(b"c", deliver_at_us=DUE),
            ],
        )
        other = later(b"other")
        of_other = withdrawing(other.id)
        ahead = later(b"ahead")
        of_ahead = withdrawing(ahead.id, by=b"instead")
        await commit(b.store, own, other, of_other, of_ahead, ahead)
        await b.restart()
        assert [fate(b, own, 1), fate(b, own, 2)] == [Fate.WITHDRAWN] * 2
        assert [fate(b, of_other), fate(b, of_ahead)] == [Fate.WITHDRAWN] * 2
        assert bodies(b.store) == [b"instead"]
        await release(b)
        await b.restart()
        assert bodies(b.store) == [b"instead", b"c"]

    run(scenario)


def test_of_one_that_is_not_there_nothing_is_known(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        kept = later()
        await commit(b.store, kept)
        cancels = [withdrawing(kept.id, 5), withdrawing(ids.new_id())]
        await commit(b.store, *cancels)
        assert fate(b, cancels[0]) is not Fate.WITHDRAWN
        assert b.store.withdrawable(ids.new_id(), 0) is None and b.store.withdrawal(kept.id, 0, T0) is None
        assert b.store.withdrawal(ids.new_id(), 0, T0) is None
        await release(b)
        assert bodies(b.store) == [b"later"]

    run(scenario)


@pytest.mark.long
def test_waiting_has_a_bound(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        many = [withdrawing(ids.new_id(), committed=True) for _ in range(MOST_UNKNOWN + 1)]
        for first in range(0, len(many), 2000):
            await b.store.put(many[first : first + 2000], T0)
        assert [fate(b, many[0]), fate(b, many[-1])] == [Fate.WAITING, Fate.NOT_FOUND]
        undecided = later()
        await b.store.put([undecided], T0)
        cancel = withdrawing(undecided.id, committed=True)
        await b.store.put([cancel], T0)
        assert fate(b, cancel) is Fate.WAITING, "messages that never come took the room of one that is there"

    run(scenario)


@pytest.mark.parametrize("is_chained", [False, True])
def test_one_without_the_right_shuts_out_no_other(run: Any, is_chained: bool) -> None:
    """Withdrawals of three topics wait for a message that the server does not know: the first with the right counts."""

    async def scenario(b: Bench) -> None:
        for name in ("other", ANY_TOPIC):
            await b.store.create_topic(Topic(name))
        target = later(b"target", committed=True)
        foreign = withdrawing(target.id, by=b"foreign", topic="other", committed=True)
        own, again = withdrawing(target.id, committed=True), withdrawing(target.id, committed=True)
        anywhere = withdrawing(target.id, topic=ANY_TOPIC, committed=True)
        of_foreign = withdrawing(foreign.id, topic="other", committed=True)
        some = [foreign, own, again, anywhere, *([of_foreign] if is_chained else [])]
        for one in some:
            await b.store.put([one], T0)
        await b.restart()
        expected = [Fate.WAITING, Fate.WAITING, Fate.ALREADY, Fate.WAITING]
        assert [fate(b, one) for one in some[:4]] == expected
        await b.store.put([target], T0 + SECOND)
        for _ in range(2):
            await b.restart()
            expected = [Fate.NOT_FOUND, Fate.WITHDRAWN, Fate.ALREADY, Fate.ALREADY]
            assert [fate(b, one) for one in some[:4]] == expected
            assert not is_chained or fate(b, of_foreign) in (Fate.TOO_LATE, Fate.NOT_FOUND)
        await release(b)
        assert bodies(b.store) == [] and bodies(b.store, "other") == []

    run(scenario)


def test_one_without_the_right_to_a_later_message_of_its_request_finds_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("other"))
        own_id = ids.new_id()
        own = NewTransaction(own_id, "g", [wanting(own_id, 1, topic="other"), message(b"kept", deliver_at_us=DUE)])
        await commit(b.store, own)
        assert fate(b, own) is Fate.NOT_FOUND
        await release(b)
        assert bodies(b.store) == [b"kept"]

    run(scenario)


@pytest.mark.parametrize("load", [3, 50])
@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_they_agree_with_a_list_over_restarts_and_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: int, segment_bytes: int
) -> None:
    """Many due times, many equal, far more than are in memory; withdrawn, replaced and released in any order, while old
    segments are dropped."""
    monkeypatch.setattr(times, "LOAD", load)

    async def run() -> None:
        rng = random.Random(load + segment_bytes)
        waiting: dict[bytes, tuple[int, int]] = {}
        released: set[int] = set()
        over: list[bytes] = []
        now_us, number = T0, 0
        store = opened(tmp_path / "log", segment_bytes)
        await store.open(now_us)
        await store.create_topic(Topic("t"))
        for _ in range(60):
            for _ in range(rng.randrange(15)):
                due_us = now_us + rng.choice([1, 5, 5, 40, 3600, 86_400]) * SECOND
                if over and rng.random() < 0.1:
                    t = withdrawing(rng.choice(over), by=b"%d" % number, committed=True)  # in vain
                elif waiting and rng.random() < 0.6:
                    target = rng.choice(list(waiting))
                    del waiting[target]
                    over.append(target)
                    by = b"%d" % number if rng.random() < 0.5 else None
                    t = withdrawing(target, by=by, committed=True, deliver_at_us=due_us if by else 0)
                else:
                    t = sent(b"%d" % number, deliver_at_us=due_us, committed=True)
                if t.messages[0].deliver_at_us:
                    waiting[t.id] = due_us, number
                await store.put([t], now_us)
                number += 1
            now_us += rng.choice([0, 1, 3, 30]) * SECOND
            while store.release_due(now_us, rng.choice([1, 7, 1000])):
                pass
            await store.sync()
            for key in [key for key, (due_us, _) in waiting.items() if due_us <= now_us]:
                released.add(waiting.pop(key)[1])
                over.append(key)
            assert {int(body) for body in bodies(store)} == released
            assert store.delayed() == len(waiting)
            if rng.random() < 0.3:
                await store.close()
                store = opened(tmp_path / "log", segment_bytes)
                await store.open(now_us)
        now_us = T0 + 2 * 86_400 * SECOND
        while store.release_due(now_us, 1000):
            pass
        await store.sync()
        assert len(bodies(store)) == len(released) + len(waiting) and store.delayed() == 0
        await store.close()

    asyncio.run(run())


def test_retention_keeps_what_waits_and_what_was_withdrawn(tmp_path: Path) -> None:
    """Segments are dropped long before the messages in them are due; a withdrawn one does not come back."""

    async def run() -> None:
        store = opened(tmp_path / "log", 4096)
        await store.open(T0)
        await store.create_topic(Topic("t"))
        store.keep(3600 * SECOND, 0)
        due_us = T0 + 30 * 86_400 * SECOND
        kept, dropped = (sent(body, deliver_at_us=due_us, committed=True) for body in (b"kept", b"dropped"))
        undecided = sent(b"undecided", deliver_at_us=due_us)
        await store.put([kept, dropped], T0)
        await store.put([undecided], T0)
        replace = withdrawing(dropped.id, by=b"instead", deliver_at_us=due_us, committed=True)
        waits = withdrawing(undecided.id, by=b"of undecided", committed=True)
        await store.put([replace, waits], T0)
        for n in range(40):
            await store.put([sent(b"%d" % n * 200, committed=True)], T0)
        now_us = T0 + 2 * 86_400 * SECOND
        await store.put([sent(b"new", committed=True)], now_us)
        await store.sync()
        await store.sealed_up()
        assert await store.retain(now_us) > 0
        await store.close()
        store = opened(tmp_path / "log", 4096)
        await store.open(now_us)
        assert store.delayed() == 2
        await store.decide([(undecided.id, "g", State.COMMITTED)], T0 + SECOND)
        await store.sync()
        assert bodies(store)[-1] == b"of undecided"
        store.release_due(due_us + SECOND, 100)
        await store.sync()
        assert bodies(store)[-2:] == [b"kept", b"instead"] and store.delayed() == 0
        await store.close()

    asyncio.run(run())
