"""Messages of which one is pending at a time for a key, on memory and on the log."""

from __future__ import annotations

import random
from typing import Any

import pytest

from notify.protocol import ids
from notify.protocol.withdrawal import Dedupe, Fate
from notify.storage import withdrawals
from notify.storage.log import dedupes
from notify.storage.memory import withdrawals as memory
from notify.storage.records import NewTransaction, State
from notify.storage.topics import Topic
from notify.storage.withdrawals import Standing
from tests.contract.stores import SECOND, T0, Bench, bodies, commit
from tests.support.transactions import message
from tests.support.withdrawals import fate, release, withdrawing


def keyed(body: bytes, key: int = 1, *, last: bool = False, topic: str = "t", within: int = 60) -> NewTransaction:
    one = message(body, topic, delay_us=within * SECOND, acts=Dedupe(key, last))
    return NewTransaction(ids.new_id(), "g", [one])


def test_the_first_message_of_a_dedupe_key_stays(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        first, second = keyed(b"first"), keyed(b"second")
        await commit(b.store, first, keyed(b"other", key=2))
        await b.restart()
        await commit(b.store, second, keyed(b"third"), at=T0 + 30 * SECOND)
        assert b.store.collapsed() == 2 and b.store.delayed() == 2
        for _ in range(2):
            await b.restart()
            assert b.store.withdrawable(second.id, 0).standing is Standing.COLLAPSED
        assert await b.store.states([second.id]) == [State.COMMITTED]
        await release(b, T0 + 61 * SECOND)
        await b.restart()
        again = keyed(b"again")
        await commit(b.store, again, keyed(b"no"), at=T0 + 62 * SECOND)
        await b.restart()
        await release(b, T0 + 200 * SECOND)
        assert bodies(b.store) == [b"first", b"other", b"again"]

    run(scenario)


def test_the_last_message_of_a_dedupe_key_replaces_the_others(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        first, second, third = (keyed(body, last=True) for body in (b"first", b"second", b"third"))
        await commit(b.store, first)
        await b.restart()
        await commit(b.store, second, at=T0 + 30 * SECOND)
        await b.restart()
        await commit(b.store, third, at=T0 + 50 * SECOND)
        await b.restart()
        assert b.store.withdrawable(first.id, 0).standing is Standing.WITHDRAWN
        await release(b, T0 + 100 * SECOND)
        assert bodies(b.store) == [] and b.store.delayed() == 1
        await release(b, T0 + 111 * SECOND)
        await b.restart()
        assert bodies(b.store) == [b"third"] and b.store.delayed() == 0

    run(scenario)


def test_keys_belong_to_a_topic_and_a_rollback_collapses_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.create_topic(Topic("other"))
        undone, kept = keyed(b"undone"), keyed(b"kept")
        await b.store.put([undone, kept], T0)
        await b.restart()
        await b.store.decide([(undone.id, "g", State.ROLLED_BACK), (kept.id, "g", State.COMMITTED)], T0)
        await commit(b.store, keyed(b"elsewhere", topic="other"))
        await b.restart()
        await release(b, T0 + 61 * SECOND)
        assert bodies(b.store) == [b"kept"] and bodies(b.store, "other") == [b"elsewhere"]

    run(scenario)


def test_a_pending_one_may_be_cancelled(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        first, second = keyed(b"first"), keyed(b"second")
        await commit(b.store, first)
        await commit(b.store, withdrawing(first.id), second)
        dropped = keyed(b"dropped")
        await b.store.put([dropped], T0)
        waits = withdrawing(dropped.id)
        await commit(b.store, waits)
        await b.store.decide([(dropped.id, "g", State.COMMITTED)], T0)
        await b.restart()
        assert fate(b, waits) is Fate.NOT_FOUND
        await release(b, T0 + 61 * SECOND)
        assert bodies(b.store) == [b"second"]

    run(scenario)


def test_nothing_is_found_of_one_that_was_collapsed(run: Any) -> None:
    """A withdrawal came TOO_LATE for it, as if it had been delivered; one that had waited for it found nothing."""

    async def scenario(b: Bench) -> None:
        first, collapsed, at_once = keyed(b"first"), keyed(b"collapsed"), keyed(b"at once")
        await commit(b.store, first)
        await commit(b.store, collapsed)
        cancel, replace, same = withdrawing(collapsed.id), withdrawing(collapsed.id, by=b"x"), withdrawing(at_once.id)
        await commit(b.store, cancel, at_once, same)
        await b.restart()
        await commit(b.store, replace)
        for _ in range(2):
            assert [fate(b, each) for each in (cancel, replace, same)] == [Fate.NOT_FOUND] * 3
            await b.restart()
        await release(b, T0 + 61 * SECOND)
        assert bodies(b.store) == [b"first"]
        late = withdrawing(first.id)
        await commit(b.store, late, at=T0 + 62 * SECOND)
        assert fate(b, late) is Fate.TOO_LATE

    run(scenario)


def test_messages_of_one_request_collapse_too(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await commit(b.store, keyed(b"a"), keyed(b"b"), keyed(b"c", key=2, last=True), keyed(b"d", key=2, last=True))
        await b.restart()
        await release(b, T0 + 61 * SECOND)
        assert bodies(b.store) == [b"a", b"d"]

    run(scenario)


def test_their_number_has_a_bound(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (withdrawals, dedupes, memory):
        monkeypatch.setattr(module, "MOST_PENDING", 5)
    monkeypatch.setattr("notify.storage.log.withdrawn.MOST_PENDING", 5)

    async def scenario(b: Bench) -> None:
        await commit(b.store, *[keyed(b"%d" % n, key=n) for n in range(5)])
        assert b.store.is_full_of_keys()
        await b.restart()
        assert b.store.is_full_of_keys()
        await release(b, T0 + 61 * SECOND)
        assert not b.store.is_full_of_keys()

    run(scenario)


def test_a_sweep_at_the_bound_waits_until_it_frees_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all keys; each message with a key would have waited for one."""
    monkeypatch.setattr(dedupes, "MOST_PENDING", 300)
    kept = dedupes.Dedupes()
    for number in range(300):
        kept.add(dedupes.PendingOne(1, number, b"", 0, T0 + number, number))
    left = []
    for number in range(7):
        kept.sweep((T0 + number - 1, number - 1))
        left.append(len(kept.pending))
    assert left == [300, 300, 300, 297, 296, 295, 294]


def test_they_agree_with_a_dictionary(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        rng = random.Random(5)
        pending: dict[int, tuple[int, bytes]] = {}
        expected: list[bytes] = []
        now_us = T0
        for number in range(300):
            body, key, last = b"%d" % number, rng.randrange(8), rng.random() < 0.5
            await commit(b.store, keyed(body, key=key, last=last, within=rng.choice([1, 5, 30])), at=now_us)
            if last or key not in pending:
                pending[key] = 0, body
            now_us += rng.choice([0, 1, 4]) * SECOND
            before = set(bodies(b.store))
            await release(b, now_us)
            released = [text for text in bodies(b.store) if text not in before]
            assert set(released) <= {text for _, text in pending.values()}
            pending = {k: one for k, one in pending.items() if one[1] not in released}
            expected += released
            assert b.store.delayed() == len(pending)
            if rng.random() < 0.1:
                await b.restart()
        await release(b, now_us + 100 * SECOND)
        assert sorted(bodies(b.store)) == sorted(expected + [text for _, text in pending.values()])

    run(scenario)
