"""The one judge on rows in memory: what each class is, and what only looks like it. It runs without Spark.

A case is one message: its local rows, what the log has of it, and the inbox rows. That these are read from databases,
logs and Kafka is for other files to show; here is each condition, with each bound that turns it off.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from notify.protocol import ids
from notify.spark.checks.outbox_waiting import DROPPED, REFUSED, WAITS
from notify.spark.explain.judging import Bounds, judge, row_of
from notify.spark.explain.trace import Row, Settled, Stand, Trace
from notify.spark.inputs.columns import TAKES_NO_PLACE, WITHDRAWN, name_hash
from notify.spark.judge import findings
from notify.spark.judge.findings import BY_NAME, FINDINGS, classes_of, judged_row
from notify.spark.judge.message_rows import BITS, MASKS, PROVEN, Groups
from notify.spark.judge.terms import Terms

SECOND, HOUR = 1_000_000, 3_600_000_000
T = 1_795_428_240_000_000
"""When the message was made: 2026-11-23 10:04:00Z."""
ID = (T // 1000).to_bytes(6) + bytes.fromhex("77b090f7e29bfbb51170")
SHOP, BANK, ABROAD = "source of the shop", "source of the bank", "source of a stranger"
TERMS = Terms(
    closed_before_us=T + HOUR,
    settled_before_us=T + HOUR,
    covered_groups=frozenset({name_hash("sales")}),
    inbox_groups=frozenset({"points"}),
    ahead_us=T + 2 * HOUR,
)
BOUNDS = Bounds(TERMS, ("shop", "bank"), {name_hash(SHOP): 0, name_hash(BANK): 1})
GROUPS = Groups(["mail", "points"], (*MASKS, PROVEN))


def local(state: str = "COMMITTED", database: str = "shop", **fields: Any) -> Row:
    row = Row(database, SHOP if database == "shop" else BANK, state, "orders", 7, T, "sales")
    return replace(row, **fields)


def place(offset: int = 5, at_us: int = T + SECOND, topic: str = "orders") -> Stand:
    return Stand("log data", topic, 0, offset, at_us)


ROWS: dict[str, Any] = {"rows": [local()]}
HALF: dict[str, Any] = {"half_us": T, "source": name_hash(SHOP), "producer_group": "sales", "digest": 7}
QUEUE: dict[str, Any] = HALF | {
    "outcomes": {"COMMITTED"}, "stands": [place()], "expected": {"points"}, "readers": {"points"},
    "settled": {"points": Settled("ACK", T + 3 * SECOND)},
}  # fmt: skip
INBOX: dict[str, Any] = {"effects": {"points": [("bank", T + 2 * SECOND)]}}
UNSETTLED = QUEUE | {"settled": {}}


@dataclass(frozen=True)
class Case:
    """One message: its local rows, the log's part of it, and the inbox; the terms that differ; and its classes."""

    what: str
    classes: str
    rows: Mapping[str, Any] = field(default_factory=dict)
    log: Mapping[str, Any] = field(default_factory=dict)
    inbox: Mapping[str, Any] = field(default_factory=dict)
    terms: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        return Trace(ids.message_id(ID, 0), **self.rows, **self.log, **self.inbox)

    @property
    def bounds(self) -> Bounds:
        return replace(BOUNDS, terms=replace(TERMS, **self.terms))


NONE: dict[str, Any] = {}
TOMBSTONE: dict[str, Any] = {"rows": [local("ROLLED_BACK", topic=None, digest=None)]}
OPEN = {"closed_before_us": T - SECOND}
HOLE = ((T - SECOND, T + SECOND),)
LATER_HOLE = ((T + 2 * HOUR, T + 3 * HOUR),)
ONLY_HALF = HALF | {"outcomes": {"COMMITTED"}}

CASES = [
    Case("all is well", "", ROWS, QUEUE, INBOX),
    Case("sent without a transaction", "", NONE, QUEUE | {"producer_group": "", "half_us": 0, "source": None}, INBOX),
    # Outcomes.
    Case("committed here, rolled back there", "CONFLICT", ROWS, HALF | {"outcomes": {"ROLLED_BACK"}}),
    Case("rolled back here, committed there", "CONFLICT", TOMBSTONE, QUEUE, INBOX),
    Case("both outcomes there", "CONFLICT", ROWS, QUEUE | {"outcomes": {"COMMITTED", "ROLLED_BACK"}}, INBOX),
    Case("a conflict of a moment ago", "PENDING", ROWS, HALF | {"outcomes": {"ROLLED_BACK"}}, terms=OPEN),
    Case("rolled back on both sides", "", TOMBSTONE, HALF | {"outcomes": {"ROLLED_BACK"}}),
    Case("no outcome", "IN_DOUBT", ROWS, HALF),
    Case("no outcome, and no row", "IN_DOUBT", NONE, HALF),
    Case("no outcome yet", "PENDING", ROWS, HALF, terms=OPEN),
    Case("an outcome that a later hole may have had", "PENDING", ROWS, HALF, terms={"holes": LATER_HOLE}),
    Case("in no log", "LOST", ROWS),
    Case("committed there, and in no queue", "LOST", ROWS, ONLY_HALF),
    Case("not in the log yet", "PENDING", ROWS, terms=OPEN),
    Case("in a hole of the log", "PENDING", ROWS, terms={"holes": HOLE}),
    Case("far from a hole of the log", "LOST", ROWS, terms={"holes": LATER_HOLE}),
    Case("of a database whose log was not given", "PENDING", ROWS, terms={"strangers": frozenset({0})}),
    Case("older than the log", "", ROWS, terms={"log_from_us": T + 2 * HOUR}),
    Case("as old as the log", "PENDING", ROWS, terms={"log_from_us": T - SECOND}),
    Case("delayed, and not due", "", ROWS, ONLY_HALF | {"due_us": T + 2 * HOUR}),
    Case("delayed, and overdue", "LOST", ROWS, ONLY_HALF | {"due_us": T + SECOND}),
    Case("withdrawn in time", "WITHDRAWN", ROWS, ONLY_HALF | {"due_us": T + SECOND, "withdrawn": WITHDRAWN}),
    Case("withdrawn, and not due", "WITHDRAWN", ROWS, ONLY_HALF | {"due_us": T + 2 * HOUR, "withdrawn": WITHDRAWN}),
    Case("a cancellation", "", ROWS, ONLY_HALF | {"withdrawn": TAKES_NO_PLACE}),
    Case("a replacement that waited", "", ROWS, QUEUE | {"withdrawn": TAKES_NO_PLACE}, INBOX),
    Case("withdrawn, and in a queue", "CONFLICT", ROWS, QUEUE | {"withdrawn": WITHDRAWN}, INBOX),
    # Outboxes.
    Case("its relay has not come to it", "UNSENT", {"rows": [local(unmoved=WAITS)]}),
    Case("its target refuses it", "UNSENT", {"rows": [local(unmoved=REFUSED)]}),
    Case("a person dropped it", "DROPPED", {"rows": [local(unmoved=DROPPED)]}),
    Case("its bridge has passed it", "LOST", {"rows": [local(unmoved=WAITS)]}, terms={"bridged_us": ((0, T + 1),)}),
    Case("its bridge is before it", "UNSENT", {"rows": [local(unmoved=WAITS)]}, terms={"bridged_us": ((0, T - 1),)}),
    Case("the bridge of another database", "UNSENT", {"rows": [local(unmoved=WAITS)]},
         terms={"bridged_us": ((1, T + 1),)}),
    Case("its half waits in a storage", "UNSENT", ROWS, ONLY_HALF | {"unmoved": WAITS}),
    Case("its half was dropped in a storage", "DROPPED", ROWS, ONLY_HALF | {"unmoved": DROPPED}),
    Case("what waits of a moment ago", "PENDING", {"rows": [local(unmoved=WAITS)]}, terms=OPEN),
    # Ghosts.
    Case("without a row", "GHOST", NONE, QUEUE, INBOX),
    Case("without a row, by the producer group", "GHOST", NONE, QUEUE | {"source": None}, INBOX),
    Case("without a row, of a database not given", "", NONE, QUEUE | {"source": name_hash(ABROAD)}, INBOX),
    Case("without a row, of a group without rows", "", NONE, QUEUE | {"source": None, "producer_group": "hr"}, INBOX),
    Case("whose row may have been purged", "", NONE, QUEUE, INBOX, {"rows_from_us": T + HOUR}),
    Case("whose half may have been deleted", "", NONE, QUEUE | {"source": None, "half_us": 0}, INBOX,
         {"halves_from_us": T + HOUR}),
    Case("a ghost of a moment ago", "PENDING", NONE, QUEUE, INBOX, OPEN),
    Case("rolled back here, with no half there", "GHOST", TOMBSTONE, QUEUE | {"half_us": 0, "source": None}, INBOX),
    # Delivery.
    Case("in two places", "DUP_ENQUEUE", ROWS, QUEUE | {"stands": [place(5), place(6)]}, INBOX),
    Case("not settled", "UNDELIVERED", ROWS, UNSETTLED),
    Case("not settled, of a moment ago", "", ROWS, UNSETTLED, terms={"settled_before_us": T}),
    Case("not settled, and due a moment ago", "", ROWS, UNSETTLED | {"due_us": T + 2 * HOUR}),
    Case("settled in a hole, perhaps", "PENDING", ROWS, UNSETTLED, terms={"holes": LATER_HOLE}),
    Case("delivered again", "REDELIVERED", ROWS, QUEUE | {"attempts": {"points": 1}}, INBOX),
    # Effects.
    Case("acknowledged, without an effect", "ACKED_NO_EFFECT", ROWS, QUEUE),
    Case("acknowledged by a group without an inbox", "", ROWS, QUEUE, terms={"inbox_groups": frozenset()}),
    Case("acknowledged before the inbox began", "", ROWS, QUEUE | {"inboxes_from": {"points": T + HOUR}}),
    Case("acknowledged since the inbox began", "ACKED_NO_EFFECT", ROWS, QUEUE | {"inboxes_from": {"points": T}}),
    Case("whose inbox row may have been purged", "", ROWS, QUEUE, terms={"inbox_from_us": T + HOUR}),
    Case("whose inbox row a copy may lack yet", "PENDING", ROWS, QUEUE, terms={"inbox_until_us": T + SECOND}),
    Case("whose inbox row a copy must have", "ACKED_NO_EFFECT", ROWS, QUEUE, terms={"inbox_until_us": T + HOUR}),
    Case("filtered", "", ROWS, QUEUE | {"settled": {"points": Settled("FILTERED", T + SECOND)}}),
    Case("whose effect is proven", "UNGUARDED", ROWS, QUEUE | {"proven": {"points"}}),
    Case("whose effect another group's proof shows", "ACKED_NO_EFFECT", ROWS, QUEUE | {"proven": {"mail"}}),
    Case("in the inboxes of two databases", "DUP_EFFECT", ROWS, QUEUE,
         {"effects": {"points": [("bank", T + SECOND), ("shop", T + SECOND)]}}),
    # Rows without a counterpart.
    Case("an inbox row alone", "ORPHAN_ROW", NONE, NONE, INBOX),
    Case("an inbox row alone, of a moment ago", "PENDING", NONE, NONE, INBOX, OPEN),
    Case("an inbox row older than the log", "", NONE, NONE, INBOX, {"log_from_us": T + HOUR}),
    Case("an inbox row of what a disk lost", "FORGOTTEN", NONE, NONE, INBOX, {"lost": HOLE}),
    Case("an inbox row beside what a disk lost", "ORPHAN_ROW", NONE, NONE, INBOX, {"lost": LATER_HOLE}),
    Case("an inbox row of a group that never subscribed", "ORPHAN_ROW", ROWS, QUEUE,
         {"effects": INBOX["effects"] | {"mail": [("bank", T + SECOND)]}}),
    Case("an inbox row of a group that once subscribed", "", ROWS, QUEUE | {"readers": {"points", "mail"}},
         {"effects": INBOX["effects"] | {"mail": [("bank", T + SECOND)]}}),
    Case("an inbox row of any group over Kafka", "", ROWS, QUEUE | {"readers": None},
         {"effects": INBOX["effects"] | {"mail": [("bank", T + SECOND)]}}),
    Case("a tombstone alone", "ORPHAN_ROW", TOMBSTONE),
    Case("a tombstone whose half may have been deleted", "", TOMBSTONE, terms={"halves_from_us": T + HOUR}),
    Case("a tombstone of what a disk lost", "FORGOTTEN", TOMBSTONE, terms={"lost": HOLE}),
    Case("what a disk lost is lost to those without an effect", "LOST", ROWS, terms={"lost": HOLE}),
    # Odd rows.
    Case("another topic", "ALTERED", {"rows": [local(topic="returns")]}, QUEUE, INBOX),
    Case("another body", "ALTERED", {"rows": [local(digest=8)]}, QUEUE, INBOX),
    Case("a body of an older SDK", "", {"rows": [local(digest=None)]}, QUEUE, INBOX),
    Case("another producer group", "ALTERED", {"rows": [local(producer_group="hr")]}, QUEUE, INBOX),
    Case("in another database", "ALTERED", {"rows": [local(database="bank")]}, QUEUE, INBOX),
    Case("in two databases", "ALTERED", {"rows": [local(), local(database="bank")]}, QUEUE, INBOX),
    Case("a state that no version writes", "MALFORMED", {"rows": [local("GARBAGE")]}, QUEUE, INBOX),
    Case("a row that is dated later", "MISDATED", {"rows": [local(at_us=T + 3 * HOUR)]}, QUEUE, INBOX),
    Case("a row that is dated earlier", "MISDATED", {"rows": [local(at_us=T - 3 * HOUR)]}, QUEUE, INBOX),
    Case("a half that is dated earlier", "MISDATED", ROWS, QUEUE | {"half_us": T - 3 * HOUR}, INBOX),
    Case("an inbox row that is older than its message", "MISDATED", ROWS, QUEUE,
         {"effects": {"points": [("bank", T - HOUR)]}}),
    Case("an inbox row that is newer than its acknowledgement", "MISDATED", ROWS, QUEUE,
         {"effects": {"points": [("bank", T + HOUR)]}}),
    Case("an inbox row of a group that acknowledged nothing", "UNDELIVERED", ROWS, UNSETTLED,
         {"effects": {"points": [("bank", T + HOUR)]}}),
    # Several at once.
    Case("lost, and dated later", "LOST MISDATED", {"rows": [local(at_us=T + 3 * HOUR)]}),
    Case("a ghost in two places", "GHOST DUP_ENQUEUE", NONE, QUEUE | {"stands": [place(5), place(6)]}, INBOX),
]  # fmt: skip
ELSEWHERE = {"LEFT_OUT", *(f.name for f in FINDINGS if f.when is None)}
"""A trace does not have these: LEFT_OUT is told apart by test_left_out.py, the others need several messages."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_message_has_its_classes_and_no_other(case: Case) -> None:
    wanted = set(case.classes.split())
    row = judged_row(row_of(case.trace, case.bounds, GROUPS), case.bounds.terms, GROUPS)
    assert set(classes_of(row["classes"])) == wanted
    verdict = judge(case.trace, case.bounds)
    assert {verdict.finding, *verdict.others} - {""} == wanted, verdict.sentence
    assert verdict.is_bad == any(BY_NAME[name].is_bad for name in wanted)


def test_every_class_of_one_row_has_a_case() -> None:
    assert {name for case in CASES for name in case.classes.split()} == BY_NAME.keys() - ELSEWHERE


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("in no log", "LOST: committed in the database; the server has no record of it"),
        ("both outcomes there", "the database says COMMITTED, the server COMMITTED and ROLLED_BACK"),
        ("withdrawn in time", "WITHDRAWN: withdrawn by its sender before it was due"),
        ("withdrawn, and in a queue", "withdrawn by its sender, and in a queue all the same"),
        ("without a row", "GHOST: in a queue; the database has no row for it"),
        ("its half waits in a storage", "UNSENT: committed in the database; its relay or bridge has not sent it"),
        ("not settled", "UNDELIVERED: not settled by points"),
        ("acknowledged, without an effect", "ACKED_NO_EFFECT: acknowledged by points, whose inbox has no row"),
        ("an inbox row of a group that never subscribed", "an inbox row of mail, which never subscribed to the topic"),
        ("a half that is dated earlier", "MISDATED: the half is dated 3.00 hours before its id was made"),
        ("another producer group", "different producer groups, one of them sales"),
        ("not in the log yet", "; but its transaction may not be over yet"),
        ("as old as the log", "; but the log may have dropped its record"),
        ("whose inbox row a copy may lack yet", "PENDING: a copy of a database may lack the inbox row"),
    ],
)
def test_explain_says_what_is_wrong_in_the_words_of_an_audit(what: str, said: str) -> None:
    (case,) = [case for case in CASES if case.what == what]
    sentence = judge(case.trace, case.bounds).sentence
    assert said in sentence and "its topic is in no log" not in sentence, sentence


def test_a_log_that_is_not_whole_proves_nothing_to_explain() -> None:
    lost = next(case for case in CASES if case.classes == "LOST")
    verdict = judge(lost.trace, replace(lost.bounds, doubts=("a segment is missing",)))
    assert verdict.finding == "INCONCLUSIVE" and "a segment is missing" in verdict.sentence
    absent = {("shop", ""): "shard b was not given"}
    assert judge(lost.trace, replace(lost.bounds, absent=absent)).finding == "INCONCLUSIVE"


RICH = replace(
    TERMS, holes=((T - 2 * HOUR, T - HOUR), LATER_HOLE[0]), lost=HOLE, log_from_us=T - 2 * HOUR, bridged_us=((0, T),),
    inbox_until_us=T + 4 * SECOND, rows_from_us=T - HOUR, inbox_from_us=T - HOUR, strangers=frozenset({1}),
    halves_from_us=T - 3 * HOUR, whole_from_us=T - 4 * HOUR,
)  # fmt: skip
TYPES = {name: pa.int32() for name in ("t_state", "other_state", "origin", "outcomes")} | {"id": pa.binary()}


@pytest.mark.long
def test_spark_and_sqlite_judge_alike(spark: Any) -> None:
    """Each case by the terms of most cases, and by terms in which everything is set; for groups in two blocks, too."""
    chance = random.Random(1)
    many = Groups([*(f"g{n}" for n in range(BITS)), "mail", "points"], (*MASKS, PROVEN))
    for terms, groups in ((TERMS, GROUPS), (RICH, GROUPS), (RICH, many)):
        rows = [row_of(case.trace, case.bounds, groups) for case in CASES]
        for row in rows[::2]:
            row |= {
                f"{mask}{b}": chance.choice([None, 0, 1, 3]) for mask in ("left", "acked") for b in range(groups.blocks)
            }
        columns = {name: pa.array([row[name] for row in rows], TYPES.get(name, pa.int64())) for name in rows[0]}
        table = pa.table(columns | {"row_number": pa.array(range(len(rows)), pa.int32())})
        judged = findings.judged(spark.createDataFrame(table), terms, groups)
        found = {row["row_number"]: (row["classes"], row["event_us"]) for row in judged.collect()}
        for number, row in enumerate(rows):
            by_sqlite = judged_row(row, terms, groups)
            assert found[number] == (by_sqlite["classes"], by_sqlite["event_us"]), (CASES[number].what, row)
