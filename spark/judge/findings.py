"""The classes of findings, each defined once, as a condition on one message's row.

`notify.spark.judge.message_rows` makes the rows; `with_facts` adds the conditions that several classes share. CONFLICT,
IN_DOUBT, LOST and GHOST are about a transaction's outcome, and a message has at most one of them; the others are about
its delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from notify.spark.checks.impossible_times import is_misdated
from notify.spark.checks.outbox_waiting import DROPPED, REFUSED, WAITS
from notify.spark.inputs.columns import COMMITTED, ROLLED_BACK
from notify.spark.judge.by_group import counts_of_groups
from notify.spark.judge.message_rows import ABROAD, DATABASE, HALF_DROPPED, HALF_WAITS, UNKNOWN, UNMOVED, Groups
from notify.spark.judge.message_times import event_us
from notify.spark.judge.terms import SKEW_US, Terms

_UNMOVED_BITS, _DATABASE_BITS = UNMOVED.bit_length() - 1, DATABASE.bit_length() - 1


@dataclass(frozen=True)
class Finding:
    """One class. `is_bad`: it makes the verdict FINDINGS. `when`: its condition; None if one row cannot show it."""

    name: str
    meaning: str
    action: str
    repair: str = ""
    is_bad: bool = True
    when: Callable[[], Column] | None = None


def _c(name: str) -> Column:
    return F.col(name)


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "CONFLICT",
        "The database and the server recorded opposite outcomes, or the server recorded both. Either a business change "
        "was not announced, or one that never happened was.",
        "Find out who forced the outcome (notify audit explain). Where the database committed, send the message again.",
        "republish",
        when=lambda: _c("is_conflict") & _c("is_closed"),
    ),
    Finding(
        "IN_DOUBT",
        "A half message has had no outcome for longer than a transaction may last: no consumer receives it.",
        "Bring a producer of the group online, or run notify check, so that the check is answered.",
        "decide",
        when=lambda: _c("is_in_doubt") & _c("is_closed"),
    ),
    Finding(
        "LOST",
        "The database committed the transaction and its message is in no queue: no consumer receives it.",
        "Send the message again: from the local row (outbox), from the half in the log, or from the business data.",
        "republish",
        when=lambda: _c("is_lost") & _c("is_closed"),
    ),
    Finding(
        "UNSENT",
        "The database committed the transaction, and its relay or bridge has not sent the message, or the target "
        "refuses it: no consumer receives it yet.",
        "Start the relay or bridge; see which messages the target refuses: notify refused list. A repair does not send "
        "the message again, because its relay still sends it.",
        when=lambda: _c("is_unsent") & _c("is_closed"),
    ),
    Finding(
        "GHOST",
        "A message was delivered for a transaction that no database committed: an effect without its cause.",
        "Undo the effects in the consumers; find out who sent it (producer group and source are in the evidence).",
        when=lambda: _c("is_ghost") & _c("is_closed"),
    ),
    Finding(
        "DUP_ENQUEUE",
        "One message is in queues more than once. Consumers with an inbox handle it once, others twice.",
        "Check the consumers without an inbox for doubled effects.",
        when=lambda: _c("places") > 1,
    ),
    Finding(
        "UNDELIVERED",
        "A subscribed group has not settled the message within the allowed time (--deliver-seconds).",
        "Check that the group's consumers run, and look at its lag: notify group show.",
        when=lambda: _c("is_undelivered"),
    ),
    Finding(
        "ACKED_NO_EFFECT",
        "A group acknowledged the message, but its inbox has no row for it, and no --effects proves its effect: the "
        "effect did not happen.",
        "Send the message to this group again; look for handlers that return before their transaction commits.",
        "redeliver",
        when=lambda: _c("is_queued") & (_c("effectless_groups") > 0),
    ),
    Finding(
        "UNGUARDED",
        "The effect happened, as --effects proves, but the inbox of the group has no row for it: it would not notice "
        "a second delivery.",
        "Do not deliver the message to this group again; find out who deleted rows of the inbox.",
        is_bad=False,
        when=lambda: _c("is_queued") & (_c("unguarded_groups") > 0),
    ),
    Finding(
        "DUP_EFFECT",
        "The business effect of a message happened more than once: by --effects, or because two databases have an "
        "inbox row of it for the same group.",
        "Undo the surplus effect; write the effect in the inbox's transaction, and give a group one database.",
        when=lambda: _c("inbox_rows") > _c("effect_groups"),
    ),
    Finding(
        "REDELIVERED",
        "The message was delivered more than once, as at-least-once delivery may. With an inbox this is harmless.",
        "Nothing, unless there are many: then handlers fail or take longer than their lease.",
        is_bad=False,
        when=lambda: _c("is_queued") & (_c("attempted_groups") > 0),
    ),
    Finding(
        "LEFT_OUT",
        "A group was subscribed to the message and never settled it: the group was moved past it or unsubscribed, the "
        "topic was deleted, purged, or dropped its oldest messages, or the message expired; or its dead letter was "
        "dropped or purged.",
        "Ask who did it whether that was meant: who, when and why are in the report. A reset to an earlier offset "
        "delivers what is still there: notify group reset. With --fail-on LEFT_OUT they fail the audit.",
        is_bad=False,
        when=lambda: _c("is_left_out"),
    ),
    Finding(
        "DROPPED",
        "A person dropped the message that its target refused: no consumer receives it.",
        "Nothing; who dropped it and why is in notify refused list --state DROPPED.",
        is_bad=False,
        when=lambda: _c("is_dropped"),
    ),
    Finding(
        "CORRUPT",
        "Bytes of the log differ from what was written.",
        "Replace the disk; restore the log from a backup, or send the message again from the business data.",
        when=None,
    ),
    Finding(
        "DISORDER",
        "An ordered group settled a later message of a key before an earlier one.",
        "Look for consumers that do not use the SDK, and for two instances with the same name.",
        when=None,
    ),
    Finding(
        "BRIDGE_GAP",
        "A bridge's positions are not contiguous: transactions that the source committed in between may be missing.",
        "Run notify bridge --backfill-from with a time before the gap: it takes what is missing from the table.",
        when=None,
    ),
    Finding(
        "ORPHAN_ROW",
        "A row without its counterpart: an inbox row of a message that is in no queue, or of a group that never "
        "subscribed to its topic, or a tombstone without a half.",
        "Harmless by itself; but a log may have been lost or replaced, or ids made up.",
        when=lambda: (_c("is_orphan") & _c("is_closed")) | (_c("strange_groups") > 0),
    ),
    Finding(
        "ALTERED",
        "The local row differs from the message that was sent: its body, key, tag, topic or producer group is another, "
        "or it is in another database than the one that the half came from.",
        "Find out who changed the row, or the message on its way; consumers handled the message as it is in the queue.",
        when=lambda: _c("is_altered"),
    ),
    Finding(
        "MISDATED",
        "The time of a local row, or of a half in the log, and the time in its id differ by more than clocks and a "
        "transaction may; or an inbox row is older than its message, or newer than its acknowledgement.",
        "Compare the clocks of producers, databases and server, or find out who changed the row.",
        when=lambda: _c("is_misdated"),
    ),
    Finding(
        "MALFORMED",
        "A row that no version of the SDK writes: its id is malformed, or its state is not known. The audit cannot use "
        "the row.",
        "Find out who wrote or changed the row, and correct it by hand.",
        when=lambda: _c("is_malformed"),
    ),
    Finding(
        "DEAD",
        "A dead letter that nobody sent again or dropped: a group gave the message up. Its effect did not happen "
        "there, unless the finding says that the inbox or --effects shows it.",
        "See why (the reasons are counted), mend the consumer, and send them again: notify dead-letter redrive; or "
        "purge them. With --fail-on DEAD they fail the audit.",
        is_bad=False,
        when=None,
    ),
    Finding(
        "FORGOTTEN",
        "An inbox row or a tombstone whose message the log lost with its disk: it was stored after the last shipped "
        "segment, and the log was restored without it.",
        "Nothing: the effect happened, or the transaction was rolled back. Messages that were published without a "
        "transaction may be lost without leaving a row.",
        is_bad=False,
        when=lambda: _c("is_forgotten") & _c("is_closed"),
    ),
    Finding(
        "PENDING",
        "Not judged: prepared or committed a moment ago, or after the slowest input, or the missing record may lie in "
        "a part of the log that could not be read. The next audit decides.",
        "Nothing; if the log is not whole, restore the missing part.",
        is_bad=False,
        when=lambda: (
            (
                (
                    _c("is_lost")
                    | _c("is_unsent")
                    | _c("is_ghost")
                    | _c("is_in_doubt")
                    | _c("is_orphan")
                    | _c("is_conflict")
                )
                & ~_c("is_closed")
            )
            | _c("is_doubtful")
        ),
    ),
)
BY_NAME = {finding.name: finding for finding in FINDINGS}
BAD = [finding.name for finding in FINDINGS if finding.is_bad]


def with_facts(life: DataFrame, terms: Terms, groups: Groups) -> DataFrame:
    """Add the conditions that several classes share, as columns. `life` also has `made_us` and masks of groups:
    `expected0`, … should receive the message, `readers0`, … ever subscribed to its queue, and the inboxes of
    `before_inbox0`, … began later."""
    has_row = _c("t_state").isNotNull()
    state = F.coalesce(_c("t_state"), F.lit(0)).bitwiseAND(UNKNOWN)
    committed_here = state == COMMITTED
    tombstone = state == ROLLED_BACK
    queued = _c("place").isNotNull()
    half = _c("half_us").isNotNull()
    outcomes = F.coalesce(_c("outcomes"), F.lit(0))
    decided = outcomes != 0
    committed_there = outcomes.bitwiseAND(COMMITTED) != 0
    rolled_back_there = outcomes.bitwiseAND(ROLLED_BACK) != 0
    sent = queued | committed_there
    event = event_us(terms.slack_us, terms.ahead_us, terms.whole_from_us)
    # A delayed message that is not due yet is not in a queue.
    waits = _is(committed_there & ~queued & (_c("due_us") >= terms.closed_before_us))
    in_doubt = half & ~decided & ~queued
    conflict = ((committed_here | committed_there) & rolled_back_there) | (tombstone & committed_there & half)
    no_row = ~has_row & _made_since(terms.rows_from_us) & _is_covered(half, terms)
    without_half = tombstone & ~half
    absent = committed_here & ~queued & ~conflict & ~in_doubt & ~waits & (event >= terms.log_from_us)
    unsent, dropped = _unsent(terms)
    lost = absent & ~unsent & ~dropped
    nothing_there = ~sent & ~half & ~decided
    orphan, forgotten = _alone(nothing_there, tombstone, has_row, terms)
    late = F.coalesce("due_us", "queued_us") < terms.settled_before_us
    ghost = sent & _c("producer_group").isNotNull() & ~conflict & (no_row | without_half)
    undelivered = queued & ~conflict & ~ghost & late & (_c("missing_groups") > 0)
    left_out = queued & ~conflict & ~ghost & (_c("left_groups") > 0)
    near_hole = _near(event, terms) | _near(_c("due_us"), terms) | _is_first(event, terms) | _is_strange(terms)
    after_hole, before_hole = _beside(event, terms)
    # If the log has a hole, the missing record may have been there.
    doubtful = (
        (lost & near_hole)
        | (in_doubt & before_hole)
        | (orphan & after_hole)
        | (ghost & without_half & after_hole)
        | ((undelivered | left_out) & before_hole)
        | (queued & (_c("unseen_groups") > 0))
    )
    return life.withColumns(_counts(terms, groups)).withColumns(
        {
            "event_us": event,
            "is_queued": queued,
            "is_conflict": conflict,
            "is_in_doubt": in_doubt & ~before_hole,
            "is_ghost": _is(ghost & ~(without_half & after_hole)),
            "is_lost": _is(lost & ~near_hole),
            "is_unsent": _is(absent & unsent),
            "is_dropped": _is(absent & dropped),
            "is_orphan": _is(orphan & ~after_hole),
            "is_forgotten": _is(forgotten),
            "is_closed": event < terms.closed_before_us,
            "is_undelivered": _is(undelivered & ~before_hole),
            "is_left_out": _is(left_out & ~before_hole),
            "is_doubtful": _is(doubtful),
            **_oddities(state, terms, groups),
        }
    )


def _is_covered(half: Column, terms: Terms) -> Column:
    """Whether a given database must have the local row of a transaction that it committed."""
    # Only the half says that a message is of no database. Retention may have deleted an older one from a storage.
    is_told = half | _made_since(terms.halves_from_us)
    return F.coalesce(_c("origin") != ABROAD, _any(_c("producer_group"), terms.covered_groups) & is_told)


def _alone(nothing_there: Column, tombstone: Column, has_row: Column, terms: Terms) -> tuple[Column, Column]:
    """Whether the row lacks a counterpart that it should have; and whether the log lost that with its disk."""
    should_have = (tombstone & _made_since(terms.halves_from_us)) | (~has_row & _c("effect_us").isNotNull())
    alone = nothing_there & should_have & _made_since(terms.log_from_us)
    forgotten = about(_c("made_us"), terms.lost, terms.slack_us)
    return alone & ~forgotten, alone & forgotten


def _counts(terms: Terms, groups: Groups) -> dict[str, Column]:
    return counts_of_groups(groups, terms.inbox_groups, terms.inbox_from_us, terms.inbox_until_us)


def _oddities(state: Column, terms: Terms, groups: Groups) -> dict[str, Column]:
    """Whether a local row is odd by itself, or differs from the message that was sent."""

    def differs(name: str) -> Column:
        return _c(name) != _c(f"other_{name}")

    number, other = (F.shiftright(name, _DATABASE_BITS) for name in ("t_state", "other_state"))
    is_moved = (number != other) | ((_c("origin") >= 0) & (_c("origin") != number))
    is_changed = _is(differs("topic")) | _is(differs("digest")) | _is(differs("producer_group"))
    return {
        "is_altered": _is(is_moved) | ((state == COMMITTED) & is_changed),
        "is_misdated": is_misdated(terms.slack_us, groups),
        "is_malformed": state == UNKNOWN,
    }


def _is(condition: Column) -> Column:
    """The condition; false if it is NULL."""
    return F.coalesce(condition, F.lit(False))


def _unsent(terms: Terms) -> tuple[Column, Column]:
    """Whether the row's message waits for its relay or bridge, or was refused; and whether a person dropped it."""
    unmoved = F.coalesce(F.shiftright("t_state", _UNMOVED_BITS), F.lit(0)).bitwiseAND(3)
    outcomes = F.coalesce(_c("outcomes"), F.lit(0))  # its high bits: a half in a storage waits, or was dropped
    unsent = (unmoved == REFUSED) | ((unmoved == WAITS) & ~_passed(terms))
    unsent |= outcomes.bitwiseAND(HALF_WAITS) != 0
    return unsent, (unmoved == DROPPED) | (outcomes.bitwiseAND(HALF_DROPPED) != 0)


def _passed(terms: Terms) -> Column:
    """Whether the bridge of the row's database has passed the row. A bridge does not change the row itself."""
    number = F.shiftright("t_state", _DATABASE_BITS)
    passed = [(number == database) & (_c("t_us") <= at_us) for database, at_us in terms.bridged_us]
    return reduce(Column.__or__, passed, F.lit(False))


def _near(at_us: Column, terms: Terms) -> Column:
    """Whether an instant lies so near to an unreadable part of the log that a message of that time may be in it."""
    return about(at_us, terms.holes, terms.slack_us)


def about(at_us: Column, times: Sequence[tuple[int, int]], slack_us: int) -> Column:
    """Whether an instant lies in one of some times (from, to), or within `slack_us` of it."""
    near = [(at_us >= from_us - slack_us) & (at_us <= to_us + slack_us) for from_us, to_us in times]
    return _is(reduce(Column.__or__, near, F.lit(False)))


def _is_first(at_us: Column, terms: Terms) -> Column:
    """Whether an instant lies so near to the log's beginning that retention may have dropped the message."""
    return at_us < terms.log_from_us + terms.slack_us if terms.log_from_us else F.lit(False)


def _beside(at_us: Column, terms: Terms) -> tuple[Column, Column]:
    """Whether an unreadable part lies before the instant, or the log was not given; and whether one lies after it."""
    if not terms.holes:
        return _is_strange(terms), F.lit(False)
    first, last = min(from_us for from_us, _ in terms.holes), max(to_us for _, to_us in terms.holes)
    return _is(at_us >= first - terms.slack_us) | _is_strange(terms), _is(at_us <= last + terms.slack_us)


def _is_strange(terms: Terms) -> Column:
    """Whether the local row is in a database whose log was not given."""
    return _is(F.shiftright("t_state", _DATABASE_BITS).isin(sorted(terms.strangers)))


def _any(column: Column, values: frozenset[int]) -> Column:
    if not values:
        return F.lit(False)
    return F.coalesce(column.isin(sorted(values)), F.lit(False))


def _made_since(us: int) -> Column:
    """Whether, by its id, a transaction certainly began after the instant; 0: always true.

    Other times prove nothing: the effect or the place in a queue may be much later than the transaction.
    """
    return _c("made_us") >= us + SKEW_US if us else F.lit(True)


def classes() -> Column:
    """The classes that apply to a row: a number with one bit for each of FINDINGS, in order."""
    conditions = {finding.name: finding.when for finding in FINDINGS if finding.when is not None}
    bits = [F.when(when(), F.lit(bit_of(name))).otherwise(0) for name, when in conditions.items()]
    return reduce(lambda total, bit: total + bit, bits).cast("int")


def bit_of(name: str) -> int:
    return 1 << FINDINGS.index(BY_NAME[name])


def has(*names: str) -> Column:
    """Whether one of these classes applies to a row."""
    return _c("classes").bitwiseAND(sum(map(bit_of, names))) != 0
