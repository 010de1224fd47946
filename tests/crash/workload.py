"""A workload that records what it was told, and the checks that a recovered log must pass: in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from notify.errors import NotifyError, StorageFailed
from notify.protocol import ids
from notify.storage.groups import SettleKind, Subscription
from notify.storage.queues import Store
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.topics import Topic

T0 = 1_800_000_000_000_000


@dataclass
class History:
    """Every intent and every answer."""

    halves: dict[bytes, list[bytes]] = field(default_factory=dict)  # acknowledged
    intents: dict[bytes, list[bytes]] = field(default_factory=dict)  # sent
    committed: list[bytes] = field(default_factory=list)  # acknowledged, in order
    rolled_back: set[bytes] = field(default_factory=set)  # acknowledged
    commit_tried: set[bytes] = field(default_factory=set)
    rollback_tried: set[bytes] = field(default_factory=set)
    acked: int = 0
    power_is_lost: bool = False
    """From then on nobody hears an answer."""

    def heard(self) -> None:
        """Raises StorageFailed where an answer came after the power was lost."""
        if self.power_is_lost:
            raise StorageFailed("the power is lost: nobody hears this")


async def work(store: Store, history: History, chance: random.Random, steps: int) -> None:
    """Halves, outcomes and acks until the storage fails or the steps are done."""
    now = T0
    if store.topic("t") is None:
        await store.create_topic(Topic("t"))
    if not store.subscriptions():
        await store.subscribe(Subscription("c", "t"), [0])
    open_ids = [i for i in history.halves if i not in history.commit_tried | history.rollback_tried]
    for _ in range(steps):
        now += 1000
        new = []
        for _ in range(chance.randint(1, 5)):
            payloads = [chance.randbytes(chance.randint(0, 900)) for _ in range(chance.randint(1, 3))]
            t = NewTransaction(ids.new_id(), "g", [NewMessage("t", p) for p in payloads])
            history.intents[t.id] = payloads
            new.append(t)
        await store.put(new, now)
        history.heard()
        for t in new:
            history.halves[t.id] = history.intents[t.id]
            open_ids.append(t.id)
        chance.shuffle(open_ids)
        ended = [(open_ids.pop(), chance.random() < 0.7) for _ in range(min(len(open_ids), chance.randint(0, 6)))]
        for transaction_id, commit in ended:
            (history.commit_tried if commit else history.rollback_tried).add(transaction_id)
        outcomes = [(i, "g", State.COMMITTED if c else State.ROLLED_BACK) for i, c in ended]
        if outcomes:
            await store.decide(outcomes, now)
            history.heard()
        for transaction_id, commit in ended:
            if commit:
                history.committed.append(transaction_id)
            else:
                history.rolled_back.add(transaction_id)
        if chance.random() < 0.3:
            end = store.bounds("t", 0)[1]
            target = chance.randint(history.acked, end)
            if target > history.acked:
                await store.settle("c", "t", 0, [(history.acked, target - history.acked)], SettleKind.ACK, now)
                history.heard()
                history.acked = target


async def violations(store: Store, history: History) -> list[str]:
    """The recovered storage's violations of the promises; empty if all are kept."""
    broken: list[str] = []
    queue = store.read("t", 0, 0, 1_000_000, 1 << 40) if store.topic("t") else []
    delivered: set[tuple[bytes, int]] = set()
    order: list[bytes] = []
    for i, m in enumerate(queue):
        if m.offset != i:
            broken.append(f"promise 8: offset {m.offset} stands at place {i}")
        if m.corrupt:
            broken.append(f"promise 1: offset {m.offset} cannot be read")
            continue
        if not order or order[-1] != m.transaction_id:
            order.append(m.transaction_id)
        sent = history.intents.get(m.transaction_id, [])
        if m.message_no >= len(sent) or sent[m.message_no] != m.payload:
            broken.append("promise 2: delivered what was not sent")
        if (m.transaction_id, m.message_no) in delivered:
            broken.append("promise 3: delivered twice")
        if m.transaction_id not in history.commit_tried:
            broken.append("promise 5: delivered without a commit")
        delivered.add((m.transaction_id, m.message_no))
    states = dict(zip(history.halves, await store.states(list(history.halves)), strict=True))
    if None in states.values():
        broken.append("promise 1: an acknowledged half is gone")
    for transaction_id in history.committed:
        whole = all((transaction_id, n) in delivered for n in range(len(history.intents[transaction_id])))
        if states.get(transaction_id) != State.COMMITTED or not whole:
            broken.append("promise 3 or 4: an acknowledged commit is gone")
    for transaction_id in history.rolled_back:
        if states.get(transaction_id) != State.ROLLED_BACK:
            broken.append("promise 3: an acknowledged rollback is gone")
    acknowledged = set(history.committed)
    if [i for i in order if i in acknowledged] != [i for i in history.committed if (i, 0) in delivered]:
        broken.append("promise 7: the log's order is not the order of the commits")
    if store.subscriptions() and store.progress("c", "t", 0).floor < history.acked:
        broken.append("promise 8: an acknowledged ack is gone")
    return broken


async def run_until_failure(store: Store, history: History, chance: random.Random, steps: int) -> bool:
    """True if the storage failed on the way (as it should under a fault)."""
    try:
        await work(store, history, chance, steps)
    except NotifyError:
        return True
    return False
