"""Decides withdrawals of delayed messages like the log (storage/log/placing.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from notify.protocol.withdrawal import ANY_TOPIC, Dedupe, Fate, Wanted
from notify.storage.records import NewMessage, State
from notify.storage.withdrawals import (
    MOST_PENDING,
    MOST_UNKNOWN,
    MOST_WAITING,
    Standing,
    Withdrawable,
    Withdrawal,
    is_in_time,
)

Key = tuple[bytes, int]
"""A message: its transaction id and its number."""


class MemoryWithdrawals:
    """The withdrawals, with their messages and fates."""

    def __init__(self, place: Callable[[Key, NewMessage, int], set[str]]) -> None:
        """`place` puts a message into its queue or among the delayed ones, and returns the topics of the former."""
        self._place = place
        self.delayed: dict[Key, tuple[int, str]] = {}
        """When each delayed message is due that is not withdrawn, and its topic."""
        self._counts: Counter[Fate] = Counter()
        self._pending: dict[tuple[str, int], Key] = {}
        """The newest message of a dedupe key, by topic and the key's hash."""
        self._collapsed = 0
        self._collapsed_at: dict[Key, int] = {}
        self._withdrawn: dict[Key, tuple[int, int]] = {}
        self._ends: dict[Key, tuple[Fate, Wanted, str, int]] = {}
        self._waiting: dict[Key, list[tuple[Key, NewMessage, int]]] = {}
        """Withdrawals by the message that they wait for, and since when they wait; 0: without limit."""
        self._waiting_count = 0
        self.transaction_of: Callable[[bytes], tuple[State, Sequence[NewMessage]] | None] = lambda _: None

    def commit(self, key: Key, message: NewMessage, now_us: int) -> set[str]:
        """Commit a message; returns the topics that got messages."""
        acts = message.acts
        if isinstance(acts, Wanted):
            return self._end(key, message, self._fate(key, message, acts, now_us), now_us)
        if acts is not None and not self._stands_alone(key, message, acts, now_us):
            return set()
        return self._place_awaited(key, message, now_us)

    def _stands_alone(self, key: Key, message: NewMessage, dedupe: Dedupe, now_us: int) -> bool:
        """Whether a message with a dedupe key gets a place: if no other message of the key stays pending."""
        of_key = message.topic, dedupe.key_hash
        other = self._pending.get(of_key)
        if other is not None and other in self.delayed:
            self._collapsed += 1
            if not dedupe.last:
                self._collapsed_at[key] = now_us
                self._find_nothing(key, now_us)
                return False
            self._withdraw(other, message.topic, now_us)
        self._pending[of_key] = key
        return True

    def collapsed(self) -> int:
        return self._collapsed

    def is_full_of_keys(self) -> bool:
        if len(self._pending) >= MOST_PENDING:
            self._pending = {of_key: key for of_key, key in self._pending.items() if key in self.delayed}
        return len(self._pending) >= MOST_PENDING

    def rolled_back(self, transaction_id: bytes, messages: Iterable[NewMessage], now_us: int) -> None:
        for number, _ in enumerate(messages):
            self._find_nothing((transaction_id, number), now_us)

    def _taken(self, key: Key) -> list[tuple[Key, NewMessage, int]]:
        """Take the withdrawals that wait for a message, in the order in which they came."""
        some = self._waiting.pop(key, [])
        self._waiting_count -= len(some)
        return some

    def _find_nothing(self, key: Key, now_us: int) -> None:
        """A message has no place: the withdrawals that wait for it find nothing."""
        for withdrawal, message, _ in self._taken(key):
            self._end(withdrawal, message, Fate.NOT_FOUND, now_us)

    def _fate(self, key: Key, message: NewMessage, wanted: Wanted, now_us: int) -> Fate:
        target = wanted.id, wanted.number
        transaction = self.transaction_of(wanted.id)
        if transaction is None:
            return self._wait(target, key, message, now_us, is_there=False)
        state, messages = transaction
        is_ahead = wanted.id == key[0] and key[1] < wanted.number < len(messages)
        if state in (State.PREPARED, State.PARKED) or is_ahead:
            if wanted.number >= len(messages) or message.topic not in (messages[wanted.number].topic, ANY_TOPIC):
                return Fate.NOT_FOUND
            return self._wait(target, key, message, now_us, is_there=True)
        if target in self._withdrawn:
            return Fate.ALREADY
        if target not in self.delayed:
            was_placed = state == State.COMMITTED and target not in self._collapsed_at
            return Fate.TOO_LATE if was_placed else Fate.NOT_FOUND
        return self._withdraw(target, message.topic, now_us)

    def _wait(self, target: Key, key: Key, message: NewMessage, now_us: int, *, is_there: bool) -> Fate:
        others = self._waiting.get(target, ())
        if any(m.topic == message.topic and is_in_time(since_us, now_us) for _, m, since_us in others):
            return Fate.ALREADY
        if self._waiting_count >= (MOST_WAITING if is_there else MOST_UNKNOWN):
            return Fate.NOT_FOUND
        self._waiting.setdefault(target, []).append((key, message, 0 if is_there else now_us))
        self._waiting_count += 1
        return Fate.WAITING

    def _withdraw(self, target: Key, topic: str, now_us: int) -> Fate:
        if target not in self.delayed:
            return Fate.TOO_LATE
        due_us, its_topic = self.delayed[target]
        if topic not in (its_topic, ANY_TOPIC):
            return Fate.NOT_FOUND
        del self.delayed[target]
        self._withdrawn[target] = due_us, now_us
        return Fate.WITHDRAWN

    def _end(self, key: Key, message: NewMessage, fate: Fate, now_us: int) -> set[str]:
        wanted = message.acts
        assert isinstance(wanted, Wanted)
        self._ends[key] = fate, wanted, message.topic, now_us
        if fate is not Fate.WAITING:
            self._counts[fate] += 1
        if fate is Fate.WITHDRAWN and wanted.replaces:
            return self._place_awaited(key, message, now_us)
        if fate is not Fate.WAITING:
            self._find_nothing(key, now_us)
        return set()

    def _place_awaited(self, key: Key, message: NewMessage, now_us: int) -> set[str]:
        touched = self._place(key, message, now_us)
        is_withdrawn = False
        for withdrawal, by, since_us in self._taken(key):
            if not is_in_time(since_us, now_us):
                continue
            if by.topic not in (message.topic, ANY_TOPIC):
                fate = Fate.NOT_FOUND
            else:
                fate = Fate.ALREADY if is_withdrawn else self._withdraw(key, by.topic, now_us)
            is_withdrawn = is_withdrawn or fate is Fate.WITHDRAWN
            touched |= self._end(withdrawal, by, fate, now_us)
        return touched

    # --- for those who ask ------------------------------------------------------------------------------------

    def withdrawals(self) -> Counter[Fate]:
        return self._counts

    def withdrawable(self, transaction_id: bytes, number: int) -> Withdrawable | None:
        key = transaction_id, number
        transaction = self.transaction_of(transaction_id)
        if transaction is None or number >= len(transaction[1]):
            return None
        state, topic = transaction[0], transaction[1][number].topic
        if state in (State.PREPARED, State.PARKED):
            return Withdrawable(topic, Standing.UNDECIDED)
        if state == State.ROLLED_BACK:
            return Withdrawable(topic, Standing.ROLLED_BACK)
        if key in self._withdrawn:
            due_us, at_us = self._withdrawn[key]
            return Withdrawable(topic, Standing.WITHDRAWN, due_us, at_us)
        if key in self._collapsed_at:
            return Withdrawable(topic, Standing.COLLAPSED, at_us=self._collapsed_at[key])
        if key in self.delayed:
            return Withdrawable(topic, Standing.DELAYED, self.delayed[key][0])
        return Withdrawable(topic, Standing.RELEASED)

    def withdrawal(self, transaction_id: bytes, number: int, now_us: int) -> Withdrawal | None:
        ended = self._ends.get((transaction_id, number))
        if ended is not None:
            fate, wanted, topic, at_us = ended
            waiting = self._waiting.get((wanted.id, wanted.number), ())
            waits = any(who == (transaction_id, number) and is_in_time(since, now_us) for who, _, since in waiting)
            is_over = fate is Fate.WAITING and not waits
            return Withdrawal(topic, wanted, Fate.NOT_FOUND if is_over else fate, at_us=at_us)
        transaction = self.transaction_of(transaction_id)
        if transaction is None or number >= len(transaction[1]):
            return None
        message = transaction[1][number]
        if not isinstance(message.acts, Wanted):
            return None
        return Withdrawal(message.topic, message.acts, None, transaction[0] == State.ROLLED_BACK)
