"""Disasters: inputs wiped, truncated, swapped, missing, doubled, foreign or skewed, each in a copy of a sound trade.

An audit must name each, or be INCONCLUSIVE with a reason that names it. It must not pass, and must not call LOST or
GHOST what lay in an input that is missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from notify.errors import InvalidRequest
from notify.spark.result import Inputs, Result
from tests.audit import harm
from tests.audit.trade import WITH_INBOX
from tests.audit.world import (
    Ids,
    World,
    all_but_first,
    every,
    of_the_bank,
    of_the_other,
    of_the_shop,
    older_of_the_bank,
)

Audit = Callable[[Inputs], Result]


@dataclass(frozen=True)
class Disaster:
    """One disaster. `reason`: a pattern of what the audit must say if it names no message."""

    kind: str
    name: str
    harm: Callable[[World], object]
    reason: str = ""
    named: Mapping[str, Ids] = field(default_factory=dict)
    """The classes that name it, each with its messages."""
    also: frozenset[str] = frozenset()
    """Classes that may be found, too, whichever messages they name."""


_DAMAGE = frozenset(["CORRUPT"])
_ACKED_BY = f"group {WITH_INBOX}.*inbox"

DISASTERS = (
    Disaster("wiped", "an inbox", harm.sql(WITH_INBOX, "DELETE FROM notify_inbox"), _ACKED_BY),
    Disaster("wiped", "local rows of a database", harm.sql("bank", "DELETE FROM half_message"), "bank: half_message"),
    Disaster("wiped", "every table", harm.both_tables_wiped, "half_message is empty"),
    Disaster("wiped", "a database's id", harm.sql("bank", "DELETE FROM notify_source"), "payments.*no given database"),
    Disaster("truncated", "an inbox, but for a row",
             harm.sql(WITH_INBOX, "DELETE FROM notify_inbox WHERE message_id <> '{first}.0'"),
             named={"ACKED_NO_EFFECT": all_but_first}),
    Disaster("truncated", "the older local rows",
             harm.sql("bank", "DELETE FROM half_message WHERE transaction_id < '{middle}'"),
             named={"GHOST": older_of_the_bank}),
    Disaster("truncated", "the first segment", harm.segment_cut(0), "cannot be read", also=_DAMAGE),
    Disaster("truncated", "a middle segment", harm.segment_cut(2), "cannot be read", also=_DAMAGE),
    Disaster("truncated", "the last segment", harm.segment_cut(-1), "it was cut"),
    Disaster("truncated", "a middle segment to nothing", harm.segment_empty(2), "shorter than a segment header",
             also=_DAMAGE),
    Disaster("truncated", "the last segment to nothing", harm.segment_empty(-1), "shorter than a segment header",
             also=_DAMAGE),
    Disaster("truncated", "checkpoints to nothing", harm.checkpoints_empty, "checkpoint"),
    Disaster("truncated", "the log, to an older copy", harm.log_of_before, "stale|ends at", also=_DAMAGE),
    Disaster("swapped", "local rows of two databases", harm.exchanged("half_message"), named={"ALTERED": every}),
    Disaster("swapped", "ids of two databases", harm.exchanged("notify_source"), named={"ALTERED": every}),
    Disaster("swapped", "the logs of two servers", harm.other_log, "do not belong together"),
    Disaster("swapped", "two segments of a log", harm.two_segments_exchanged, "exchanged with another", also=_DAMAGE),
    Disaster("swapped", "segments of two servers", harm.segment_of_another_log(2),
             "exchanged with another", also=_DAMAGE),
    Disaster("swapped", "the first segments of two servers", harm.segment_of_another_log(0),
             "belongs to another log"),
    Disaster("missing", "the first segment", harm.segment_gone(0), "first segments are missing"),
    Disaster("missing", "a middle segment", harm.segment_gone(2), "are missing", also=_DAMAGE),
    Disaster("missing", "the last segment", harm.segment_gone(-1), "it was cut"),
    Disaster("missing", "the last segment and the checkpoints", harm.last_segment_and_checkpoint_gone, "stale|ends at"),
    Disaster("missing", "all segments but the last", harm.all_segments_but_the_last, "first segments are missing"),
    Disaster("missing", "the first segment and the checkpoints", harm.checkpoint_and_first_segment_gone,
             "first segments are missing"),
    Disaster("missing", "every segment", harm.no_segment, "has no log"),
    Disaster("missing", "a sender's database", harm.not_given("bank"), "payments.*no given database"),
    Disaster("missing", "the database of an inbox", harm.not_given(WITH_INBOX), _ACKED_BY),
    Disaster("missing", "the table of an inbox", harm.dropped(WITH_INBOX, "notify_inbox"), _ACKED_BY),
    Disaster("missing", "the table of local rows", harm.dropped("bank", "half_message"), "bank: half_message"),
    Disaster("doubled", "the same log", harm.same_log_twice, "same log"),
    Disaster("doubled", "a copy of the log", harm.copy_of_the_log, "same log"),
    Disaster("doubled", "the same database", harm.same_database_twice, "same source id"),
    Disaster("doubled", "a clone of a database", harm.clone_beside, "same source id"),
    Disaster("doubled", "local rows, in an earlier database", harm.rows_of("bank", "half_message", "shop"),
             named={"ALTERED": of_the_bank}),
    Disaster("doubled", "local rows, in a later database", harm.rows_of("shop", "half_message", "bank"),
             named={"ALTERED": of_the_shop}),
    Disaster("doubled", "inbox rows", harm.rows_of(WITH_INBOX, "notify_inbox", "shop"), named={"DUP_EFFECT": every}),
    Disaster("foreign", "a log beside this one", harm.other_log_beside, "belong together"),
    Disaster("foreign", "all databases", harm.all_foreign, "do not belong together"),
    Disaster("foreign", "a sender's database beside these", harm.foreign_beside("shop"), "foreign"),
    Disaster("foreign", "a sender's database instead", harm.foreign_instead, "payments.*no given database"),
    Disaster("foreign", "the database of an inbox beside these", harm.foreign_beside(WITH_INBOX),
             named={"ORPHAN_ROW": of_the_other}),
    Disaster("skewed", "a database's clock, ahead", harm.clock_ahead, named={"MISDATED": of_the_bank}),
    Disaster("skewed", "times of local rows, back", harm.shifted("half_message", "bank", -harm.HOURS_US),
             named={"MISDATED": of_the_bank}),
    Disaster("skewed", "times of local rows, ahead", harm.shifted("half_message", "bank", harm.HOURS_US),
             named={"MISDATED": of_the_bank}),
    Disaster("skewed", "times of an inbox, back", harm.shifted("notify_inbox", WITH_INBOX, -harm.HOURS_US),
             named={"MISDATED": every}),
    Disaster("skewed", "times of an inbox, ahead", harm.shifted("notify_inbox", WITH_INBOX, harm.HOURS_US),
             named={"MISDATED": every}),
    Disaster("skewed", "a log's times, back", harm.log_clock(-harm.HOURS_US), named={"MISDATED": every}),
    Disaster("skewed", "a log's times, ahead", harm.log_clock(harm.HOURS_US), named={"MISDATED": every}),
)  # fmt: skip


HARMLESS = (
    ("index files missing", harm.indexes_gone),
    ("checkpoints missing, of a log that begins at byte 0", harm.checkpoints_gone),
    ("names of two databases exchanged", harm.names_exchanged),
    ("a database's clock five minutes ahead", harm.clock_a_little_ahead),
)
"""Changes that an audit must pass: nothing is missing or wrong."""


@dataclass(frozen=True)
class Outcome:
    """How an audit dealt with a disaster."""

    disaster: Disaster
    verdict: str
    """The audit's, or REFUSED."""
    counts: Mapping[str, int]
    reasons: tuple[str, ...]
    wrong: tuple[str, ...]
    """All that should not be; empty if the audit did right."""


def outcome_of(disaster: Disaster, world: World, audit: Audit) -> Outcome:
    """Harm the world, audit it, and compare the result with what the disaster is."""
    disaster.harm(world)
    try:
        with world.inputs() as inputs:
            result = audit(inputs)
    except InvalidRequest as refusal:
        wrong = () if disaster.reason and re.search(disaster.reason, str(refusal)) else ("refused for another reason",)
        return Outcome(disaster, "REFUSED", {}, (str(refusal),), wrong)
    counts = {name: count for name, count in result.counts.items() if count and name != "PENDING"}
    wrong = tuple(_complaints(disaster, world, result, counts))
    return Outcome(disaster, result.verdict, counts, tuple(result.reasons), wrong)


def complaints_of_harmless(harm_it: Callable[[World], object], world: World, audit: Audit) -> list[str]:
    """All that is wrong with the audit of a world to which something harmless was done."""
    harm_it(world)
    with world.inputs() as inputs:
        result = audit(inputs)
    counts = {name: count for name, count in result.counts.items() if count}
    return [] if result.verdict == "PASS" and not counts else [f"{result.verdict} {counts} {result.reasons}"]


def _complaints(disaster: Disaster, world: World, result: Result, counts: Mapping[str, int]) -> Iterator[str]:
    if result.verdict == "PASS":
        yield "it passed"
    if not disaster.named and not any(re.search(disaster.reason, reason) for reason in result.reasons):
        yield "no reason names it"
    ids: dict[str, set[str]] = {}
    for case in result.found:
        ids.setdefault(case.finding, set()).add(case.message_id)
    for name, wanted in disaster.named.items():
        if ids.get(name, set()) != wanted(world):
            yield f"{name} names {len(ids.get(name, ()))} messages, not {len(wanted(world))}"
    for name, count in counts.items():
        if name not in disaster.named and name not in disaster.also:
            yield f"{count} times {name}"
    names = Counter(case.finding for case in result.found)
    for name in names.keys() & counts.keys():
        if names[name] != counts[name]:
            yield f"{counts[name]} of {name} counted, {names[name]} shown"
