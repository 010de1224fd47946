"""The order of keys on the way to a target: which transactions may go beside each other, and which have to wait."""

from __future__ import annotations

from collections.abc import Sequence

from notify.wire import BridgedTransaction, Item

Step = dict[str, list[BridgedTransaction]]
"""Transactions by producer group. Two of different groups share no key, so the groups may be sent in any order."""


def keys_of(transaction: BridgedTransaction) -> set[tuple[str, str]]:
    """(topic, key) of each message that has a key."""
    return {(m.topic, m.key) for m in transaction.messages if m.key is not None}


def steps_of(transactions: Sequence[BridgedTransaction]) -> list[Step]:
    """Transactions in as few steps as keep the order per key, where each request carries one producer group.

    The steps are sent one after the other, and a group's transactions in a step in their order.
    """
    if len({t.producer_group for t in transactions}) <= 1:
        return [{transactions[0].producer_group: list(transactions)}] if transactions else []
    steps: list[Step] = []
    last: dict[tuple[str, str], tuple[int, str]] = {}
    for t in transactions:
        keys, group = keys_of(t), t.producer_group
        before = [last[key] for key in keys if key in last]
        step = max((number + (other != group) for number, other in before), default=0)
        if step == len(steps):
            steps.append({})
        steps[step].setdefault(group, []).append(t)
        for key in keys:
            last[key] = step, group
    return steps


def is_for_now(item: Item) -> bool:
    """Whether a target refuses a transaction that it may take later: it is to be put again."""
    return item.status == 429 or item.status >= 500


class HeldBack:
    """Transactions that wait because the target refuses them, or one before them with the same key, for now."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        """Whole topics that wait."""
        self._keys: set[tuple[str, str]] = set()
        self._refused: set[str] = set()
        """Topics of transactions that wait, and are of one topic only."""
        self._any = False

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return self._any

    def hold(self, transaction: BridgedTransaction, *, topics: bool = False) -> None:
        """Hold back everything behind this one that shares a key with it.

        With `topics` also its whole topic; where it has several, only one of them may be the one that takes nothing.
        """
        self._wait(transaction)
        if topics and len({m.topic for m in transaction.messages}) == 1:
            self.topics.add(transaction.messages[0].topic)

    def widen(self) -> None:
        """Hold back the whole topics of what waits.

        A mover that goes on by keys reads every waiting row of such a topic, only to hold most of them back. It can
        leave a whole topic out of its query, and so gets to the rows of other topics, however many wait before them.
        """
        self.topics |= self._refused
        self._keys = {(topic, key) for topic, key in self._keys if topic not in self.topics}

    def _wait(self, transaction: BridgedTransaction) -> None:
        self._any = True
        self._keys |= keys_of(transaction)
        topics = {m.topic for m in transaction.messages}
        if len(topics) == 1:
            self._refused |= topics

    def holds(self, transaction: BridgedTransaction) -> bool:
        """Whether a transaction has to wait; if so, what comes behind it and shares a key with it does, too."""
        if not self._any:
            return False
        if any((m.topic, m.key) in self._keys or m.topic in self.topics for m in transaction.messages):
            self._wait(transaction)
            return True
        return False
