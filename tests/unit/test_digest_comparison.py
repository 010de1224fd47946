"""Slots are equal exactly if their messages are: any single change makes a slot unequal."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notify.protocol import ids
from notify.spark.digest import hashes
from notify.spark.digest.comparison import Compared, Comparison
from notify.spark.digest.log_slots import LogSlots
from notify.spark.digest.logs import LATE, ODD, OPEN, PENDING, ROLLED, WAITING, WHOLE
from notify.spark.digest.slots import SLOT_US, slot_at
from notify.spark.digest.tables import EffectSlot, LocalSlot, TableSlots, topic_text
from notify.spark.inputs.catalog import Catalog
from notify.spark.inputs.changes import Left
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge.coverage import Coverage
from notify.spark.judge.deadlines import InTime
from notify.spark.judge.message_rows import Groups
from notify.spark.judge.terms import Terms

AT_US = 1_790_000_000_000_000 // SLOT_US * SLOT_US
SLOT = slot_at(AT_US)
GROUPS = Groups(["points", "mail"])
INBOXES = frozenset({"points"})
TOPICS = {1: "order.placed", 2: "order.paid"}
PRODUCERS = {1: "orders", 2: "bank"}
SOURCES = {"00000000-0000-4000-8000-000000000000": 0, "00000000-0000-4000-8000-000000000001": 1}


@dataclass(frozen=True)
class Sent:
    """A committed message as every input has it: its producer group's number is that of its database, plus 1."""

    name: bytes
    number: int = 0
    topic: int = 1
    producer: int = 1
    offset: int = 0
    digest: int = 5

    @property
    def text(self) -> str:
        return f"{ids.to_text(self.name)}.{self.number}"

    def hash(self, with_digest: bool = False) -> int:
        return hashes.of_text(f"{self.text}:{self.digest}" if with_digest else self.text)

    def row(self, form: int = WHOLE, **fields: Any) -> dict[str, Any]:
        """The row of a log's digest that has this message alone."""
        is_queued = form in (WHOLE, LATE)
        has_half = form in (WHOLE, OPEN, PENDING, ROLLED)
        source = next(text for text, number in SOURCES.items() if number == self.producer - 1)
        return {
            "slot": self.name[:4], "topic": self.topic, "queue": 0, "producer_group": self.producer,
            "source": name_hash(source) if has_half or form == WAITING else None,
            "form": form, "bucket": 3 if is_queued else None, "acked0": 3 * is_queued, "settled0": 3 * is_queued,
            "count": 1, "hash": self.hash(), "body_hash": self.hash(True), "digests": 1, "places": int(is_queued),
            "acknowledged": int(is_queued), "again": 0, "due": int(is_queued),
            "delivered": int(is_queued), "halves": int(has_half), "first_count": int(not self.number),
            "first_hash": self.hash(), "low_us": AT_US + 10, "high_us": AT_US + 20,
            "first_acked_us": AT_US + 40 if is_queued else None,
            "low_offset": self.offset if is_queued else None, "high_offset": self.offset if is_queued else None,
        } | fields  # fmt: skip


class Books:
    """The rows of all inputs."""

    def __init__(self, sent: list[Sent]) -> None:
        self.rows = [message.row() for message in sent]
        self.local = {(message.producer - 1, message.text): message for message in sent}
        self.effects = [message.text for message in sent]
        self.effects_us = (AT_US + 30, AT_US + 30)
        self.tombstones: list[str] = []
        self.odd = 0
        self.with_digests = True

    def compared(self, wanted: tuple[str, ...] = ()) -> Compared:
        in_time = InTime(AT_US + 10 * SLOT_US, 1, 0, 0, INBOXES, frozenset())
        logs = LogSlots(GROUPS, SOURCES, in_time)
        logs.add(0, cast(LogInput, _Log()), self.rows)
        terms = Terms(AT_US + 10 * SLOT_US, AT_US + 10 * SLOT_US, frozenset(), INBOXES)
        coverage = Coverage(0, AT_US + 20 * SLOT_US, terms.closed_before_us, terms, None, False, SOURCES)
        tables = [self._table(number) for number in (0, 1)]
        return Comparison(tables, logs.slots, coverage, INBOXES, frozenset(PRODUCERS.values())).compared(wanted)

    def is_equal(self) -> bool:
        compared = self.compared()
        assert len(compared.equal) + len(compared.unequal) == 1
        return bool(compared.equal)

    def _table(self, number: int) -> TableSlots:
        table = TableSlots()
        own = [message for (database, _), message in self.local.items() if database == number]
        for producer, group in PRODUCERS.items():
            rows = [message for message in own if message.producer == producer]
            buried = self.tombstones if (number, producer) == (0, 1) else []
            if not rows and not buried:
                continue
            combined = 0
            for topic, name in TOPICS.items():
                values = [message.hash(self.with_digests) for message in rows if message.topic == topic]
                if values:
                    combined ^= hashes.of_text(topic_text(_xor(values), len(values), name))
            dead = _xor([hashes.of_text(text) for text in buried])
            digests = len(rows) * self.with_digests
            table.local[SLOT, group] = LocalSlot(
                len(rows), combined, digests, len(buried), dead, self.odd, AT_US + 5, AT_US + 15
            )
        if number == 0 and self.effects:
            table.effects[SLOT, "points"] = EffectSlot(
                len(self.effects), _xor([hashes.of_text(text) for text in self.effects]), 0, *self.effects_us
            )
        return table


class _Log:
    """A log's catalog and subscriptions."""

    catalog = Catalog(topics=dict(TOPICS), producer_groups=dict(PRODUCERS))
    name = "log"
    left: ClassVar[dict[tuple[int, int], list[Left]]] = {}

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        return {(topic, 0): [("points", 0), ("mail", 10)] for topic in TOPICS}


def _xor(values: list[int]) -> int:
    combined = 0
    for value in values:
        combined ^= value
    return combined


def some(count: int, chance: random.Random) -> list[Sent]:
    names = [(AT_US // 1000 + chance.randrange(60_000)).to_bytes(6) + chance.randbytes(10) for _ in range(count)]
    return [
        Sent(name, chance.randrange(3), chance.choice([1, 2]), chance.choice([1, 2]), n, chance.randrange(1, 1 << 60))
        for n, name in enumerate(names)
    ]


def lost(books: Books, at: int) -> None:
    books.rows.pop(at)


def ghost(books: Books, at: int) -> None:
    books.local.pop(list(books.local)[at])


def another(books: Books, at: int, **fields: Any) -> None:
    key = list(books.local)[at]
    books.local[key] = replace(books.local[key], **fields)


def other_topic(books: Books, at: int) -> None:
    another(books, at, topic=3 - list(books.local.values())[at].topic)


def other_body(books: Books, at: int) -> None:
    another(books, at, digest=list(books.local.values())[at].digest + 1)


def other_number(books: Books, at: int) -> None:
    another(books, at, number=list(books.local.values())[at].number + 1)


def other_database(books: Books, at: int) -> None:
    (number, text), message = list(books.local.items())[at]
    del books.local[number, text]
    books.local[1 - number, text] = message


def doubled(books: Books, at: int) -> None:
    books.rows.append(dict(books.rows[at]))


def tripled(books: Books, at: int) -> None:
    """XOR alone would not show it."""
    books.rows += [dict(books.rows[at]), dict(books.rows[at])]


def in_doubt(books: Books, at: int) -> None:
    books.rows.append(Sent((AT_US // 1000).to_bytes(6) + bytes(10)).row(OPEN))


def effectless(books: Books, at: int) -> None:
    books.effects.pop(at)


def orphaned(books: Books, at: int) -> None:
    books.effects.append(f"{ids.to_text((AT_US // 1000).to_bytes(6) + bytes(10))}.0")


def undelivered(books: Books, at: int) -> None:
    books.rows[at] |= {"settled0": 2, "acked0": 2}
    books.effects.pop(at)


def rolled_back(books: Books, at: int) -> None:
    message = list(books.local.values())[at]
    books.rows[at] = message.row(ROLLED)
    books.effects.pop(at)


def dated_back(books: Books, at: int) -> None:
    books.effects_us = (AT_US - 3 * 3_600_000_000, AT_US + 30)


def dated_ahead(books: Books, at: int) -> None:
    books.effects_us = (AT_US + 30, AT_US + 3 * 3_600_000_000)


def odd_form(books: Books, at: int) -> None:
    books.rows[at]["form"] = ODD


def odd_state(books: Books, at: int) -> None:
    books.odd = 1


def tombstone(books: Books, at: int) -> None:
    books.tombstones.append(f"{ids.to_text((AT_US // 1000).to_bytes(6) + bytes(10))}.0")


HARMS: list[Callable[[Books, int], None]] = [
    lost, ghost, other_topic, other_body, other_number, other_database, doubled, tripled, in_doubt, effectless,
    orphaned, undelivered, rolled_back, odd_form, odd_state, tombstone, dated_back, dated_ahead,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(0, 1 << 32).map(random.Random))
def test_any_change_makes_a_slot_unequal(harm: Callable[[Books, int], None], count: int, chance: random.Random) -> None:
    books = Books(some(count, chance))
    assert books.is_equal()
    harm(books, chance.randrange(count))
    assert not books.is_equal()


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 12), st.integers(0, 1 << 32).map(random.Random))
def test_two_topics_that_changed_places_are_seen(count: int, chance: random.Random) -> None:
    messages = some(count, chance)
    messages[:2] = [replace(m, topic=n, producer=1) for n, m in zip((1, 2), messages, strict=False)]
    books = Books(messages)
    other_topic(books, 0)
    other_topic(books, 1)
    assert not books.is_equal()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(0, 1 << 32).map(random.Random))
def test_parts_in_other_segments_complete_each_other(count: int, chance: random.Random) -> None:
    messages = some(count, chance)
    books = Books(messages)
    parted = chance.randrange(count)
    first = chance.choice([OPEN, PENDING])
    books.rows[parted] = messages[parted].row(first)
    assert not books.is_equal()
    late = messages[parted].row(LATE, body_hash=None, digests=0)
    books.rows.append(late)
    assert books.is_equal()
    books.rows[-1] = late | {"topic": 3 - late["topic"]}
    assert not books.is_equal()


def test_messages_of_a_relay_have_no_half() -> None:
    messages = some(6, random.Random(1))
    books = Books(messages)
    books.rows = [message.row(LATE) for message in messages]
    assert books.is_equal(), "the database follows from the producer group"
    books.with_digests = False
    assert books.is_equal(), "an older SDK's rows have no digests"


def test_a_delayed_message_may_wait() -> None:
    messages = some(4, random.Random(2))
    books = Books(messages)
    books.rows[0] = messages[0].row(WAITING)
    books.effects.pop(0)
    assert books.is_equal()


def test_rollbacks_are_equal_with_their_tombstones_or_without() -> None:
    messages = some(4, random.Random(3))
    books = Books(messages)
    gone = replace(messages[0], name=(AT_US // 1000).to_bytes(6) + bytes(10), number=0, producer=1)
    books.rows.append(gone.row(ROLLED))
    assert books.is_equal()
    books.tombstones.append(gone.text)
    (known,) = books.compared().equal
    assert sum(figures["rows"] for figures in known.topics.values()) == 5
    assert sum(figures["due"] for figures in known.topics.values()) == 4
    books.rows.append(gone.row(LATE))  # committed besides, by another segment
    assert not books.is_equal()


def test_redelivered_messages_are_counted() -> None:
    books = Books(some(4, random.Random(4)))
    books.rows[0]["again"] = 1
    assert books.is_equal()
    assert books.compared(("REDELIVERED",)).unequal == [SLOT]
