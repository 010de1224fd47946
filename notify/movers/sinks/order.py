"""Keeps the order of keys on the way to a target: which transactions may be sent together, and which must wait."""

from __future__ import annotations

from collections.abc import Sequence

from notify.protocol.wire import BridgedTransaction, Item

Step = dict[str, list[BridgedTransaction]]
"""Transactions by producer group. Transactions of different groups share no key, so that groups have no order."""


def keys_of(transaction: BridgedTransaction) -> set[tuple[str, str]]:
    """Topic and key of each message that has a key."""
    return {(m.topic, m.key) for m in transaction.messages if m.key is not None}


def steps_of(transactions: Sequence[BridgedTransaction]) -> list[Step]:
    """Divide transactions into as few steps as possible that keep the order per key; a request has one producer group.

    The steps are sent in order, and so are the transactions of a group within a step.
    """
    if len({t.producer_group for t in transactions}) <= 1:
        return [{transactions[0].producer_group: list(transactions)}] if transactions else []
    steps: list[Step] = []
    last: dict[tuple[str, str], tuple[int, str]] = {}
    for transaction in transactions:
        keys, group = keys_of(transaction), transaction.producer_group
        before = [last[key] for key in keys if key in last]
        step = max((number + (other_group != group) for number, other_group in before), default=0)
        if step == len(steps):
            steps.append({})
        steps[step].setdefault(group, []).append(transaction)
        for key in keys:
            last[key] = step, group
    return steps


def is_for_now(item: Item) -> bool:
    """Whether a target refuses a transaction that it may accept later, so that it has to be put again."""
    return item.status == 429 or item.status >= 500


class HeldBack:
    """Transactions that wait, because the target refuses them or an earlier one with the same key for now."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        """Whole topics that wait."""
        self._keys: set[tuple[str, str]] = set()
        self._refused: set[str] = set()
        """The topics of waiting transactions that have a single topic."""
        self._any = False

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return self._any

    def hold(self, transaction: BridgedTransaction, *, topics: bool = False) -> None:
        """Hold back all later transactions that share a key with this one.

        With `topics`, also hold back its whole topic, unless it has several, of which perhaps only one is full.
        """
        self._wait(transaction)
        if topics and len({m.topic for m in transaction.messages}) == 1:
            self.topics.add(transaction.messages[0].topic)

    def widen(self) -> None:
        """Hold back the whole topics of waiting transactions.

        While only keys are held back, a mover reads all waiting rows of such a topic, and holds most of them back. A
        whole topic can be left out of its query, so that it reaches the rows of other topics sooner.
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
        """Whether a transaction must wait; if so, later transactions that share a key with it must wait, too."""
        if not self._any:
            return False
        if any((m.topic, m.key) in self._keys or m.topic in self.topics for m in transaction.messages):
            self._wait(transaction)
            return True
        return False
