"""The classes of findings, each declared once, with its condition on a message's row: the judge of every audit.

`notify.spark.judge.message_rows` makes the rows; `facts` adds the conditions that several classes share. CONFLICT,
IN_DOUBT, LOST and GHOST are about a transaction's outcome, and a message has at most one of them; the others are about
its delivery. The conditions are SQL, so that Spark judges millions of rows by them, and SQLite a single one.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from notify.spark.checks.outbox_waiting import DROPPED, REFUSED, WAITS
from notify.spark.inputs.columns import COMMITTED, ROLLED_BACK, TAKES_NO_PLACE, WITHDRAWN
from notify.spark.judge.message_rows import (
    ABROAD,
    DATABASE,
    HALF_DROPPED,
    HALF_WAITS,
    MARKS,
    PROVEN,
    UNKNOWN,
    UNMOVED,
    Groups,
)
from notify.spark.judge.message_times import event_us
from notify.spark.judge.terms import SKEW_US, Terms


class Rank(enum.IntEnum):
    """How much a class matters to the business: an audit names first what has the lowest number."""

    EFFECT = 0  # an effect is missing, surplus, or without its cause
    LATE = 1  # an effect is late, or something hides whether it is missing
    MESSAGE = 2  # messages are not as they were sent: twice, out of order, changed
    TRACE = 3  # rows and times that are odd, and what is harmless
    OPEN = 4  # not judged yet


@dataclass(frozen=True)
class Finding:
    """One class, with all that tells it from others. Two things are elsewhere: the sentence about a single case in
    spark.judge.evidence, and how a repair is made in spark.repair.planning."""

    name: str
    meaning: str
    action: str
    _: KW_ONLY
    cause: str = ""
    """Such findings with one cause, in a sentence. {who}: the group or the like; {n}: "4 messages"; {of}: " of topic
    orders"; {when}: "between … and …". "": spark.causes.sentences has more to say about them."""
    noun: str = "message"
    """The noun of {n}."""
    rank: Rank
    repair: str = ""
    """The repair that a plan has for it (`--plan`); "": none, a person has to act."""
    is_bad: bool = True
    """Whether it makes the verdict FINDINGS, and a watch reports it; other classes only if `--fail-on` names them."""
    names_groups: bool = False
    """Whether it is about the consumer groups that its cases name, and not about who sent the message."""
    by_group: bool = False
    """Whether a watch reports it for each of these groups alone: one may be put right before another."""
    may_pass: bool = False
    """Whether a later look of a watch may take it back."""
    event: tuple[str, ...] = ()
    """The evidence that says when a case happened, the best first; without it the time of its transaction does."""
    when: str | None = None
    """Its condition on the columns of `facts`; None if one row cannot show it."""


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "CONFLICT",
        "The database and the server recorded opposite outcomes, or the server recorded both; or a message that was "
        "withdrawn is in a queue. So a business change was not announced, or one was announced that never happened.",
        "Find out who forced the outcome (notify audit explain). Where the database committed, send the message again.",
        cause="{who}: {n} with opposite outcomes in the database and on the server, {when}",
        rank=Rank.EFFECT,
        repair="republish",
        may_pass=True,
        when="is_conflict AND is_closed",
    ),
    Finding(
        "IN_DOUBT",
        "A half message has had no outcome for longer than a transaction may last: no consumer receives it.",
        "Bring a producer of the group online, or run notify check, so that the check is answered.",
        cause="{who}: {n} without an outcome, {when}",
        rank=Rank.LATE,
        repair="decide",
        may_pass=True,
        when="is_in_doubt AND is_closed",
    ),
    Finding(
        "LOST",
        "The database committed the transaction and its message is in no queue: no consumer receives it.",
        "Send the message again: from the local row (outbox), from the half in the log, or from the business data.",
        cause="{who}: {n} committed and in no queue, {when}",
        rank=Rank.EFFECT,
        repair="republish",
        may_pass=True,
        when="is_lost AND is_closed",
    ),
    Finding(
        "UNSENT",
        "The database committed the transaction, and its relay, its bridge or (mode auto) a producer of its group has "
        "not sent the message, or the target refuses it: no consumer receives it yet.",
        "Start the relay or bridge (for mode auto a producer of the group, or notify check, will also do); see which "
        "messages the target refuses: notify refused list. A repair does not send the message again, because these "
        "processes still send it.",
        cause="{who}: {n} committed and not sent by the relay, bridge or producer, or refused, {when}",
        rank=Rank.LATE,
        may_pass=True,
        when="is_unsent AND is_closed",
    ),
    Finding(
        "GHOST",
        "A message was delivered for a transaction that no database committed: an effect without its cause.",
        "Undo the effects in the consumers; find out who sent it (producer group and source are in the evidence).",
        cause="{who}: {n} delivered that no database committed, {when}",
        rank=Rank.EFFECT,
        may_pass=True,
        when="is_ghost AND is_closed",
    ),
    Finding(
        "DUP_ENQUEUE",
        "A message is in the queues more than once. Consumers with an inbox handle it once, others each time.",
        "Check the consumers without an inbox for doubled effects.",
        cause="{who}: {n}{of} in queues more than once, {when}",
        rank=Rank.MESSAGE,
        when="places > 1",
    ),
    Finding(
        "UNDELIVERED",
        "A subscribed group has not settled the message within the allowed time (--deliver-seconds).",
        "Check that the group's consumers run, and look at its lag: notify group show.",
        rank=Rank.LATE,
        names_groups=True,
        by_group=True,
        may_pass=True,
        event=("due_us", "queued_us"),
        when="is_undelivered",
    ),
    Finding(
        "ACKED_NO_EFFECT",
        "A group acknowledged the message, but its inbox has no row for it, and no --effects proves its effect: the "
        "effect did not happen.",
        "Send the message to this group again; look for handlers that return before their transaction commits.",
        cause="{who} acknowledged {n}{of} {when} without an effect",
        rank=Rank.EFFECT,
        repair="redeliver",
        names_groups=True,
        by_group=True,
        may_pass=True,
        event=("acked_us",),
        when="is_queued AND effectless_groups > 0",
    ),
    Finding(
        "UNGUARDED",
        "The effect happened, as --effects proves, but the inbox of the group has no row for it: it would not notice "
        "a second delivery.",
        "Do not deliver the message to this group again; find out who deleted rows of the inbox.",
        cause="{who}: {n}{of} took effect, as --effects proves, {when}, and the inbox has no row",
        rank=Rank.TRACE,
        is_bad=False,
        when="is_queued AND unguarded_groups > 0",
    ),
    Finding(
        "DUP_EFFECT",
        "The business effect of a message happened more than once: by --effects, or because two databases have an "
        "inbox row of it for the same group.",
        "Undo the surplus effect; write the effect in the inbox's transaction, and give a group one database.",
        cause="{who}: {n}{of} took effect more than once, {when}",
        rank=Rank.EFFECT,
        names_groups=True,
        when="inbox_rows > effect_groups",
    ),
    Finding(
        "REDELIVERED",
        "The message was delivered more than once, as at-least-once delivery may. With an inbox this is harmless.",
        "Nothing, unless there are many: then handlers fail or take longer than their lease.",
        cause="{who} got {n}{of} more than once, {when}",
        rank=Rank.TRACE,
        is_bad=False,
        names_groups=True,
        when="is_queued AND attempted_groups > 0",
    ),
    Finding(
        "LEFT_OUT",
        "A group was subscribed to the message and never settled it: the group was moved past it or unsubscribed, the "
        "topic was deleted, purged, or dropped its oldest messages, or the message expired; or its dead letter was "
        "dropped or purged.",
        "Ask the author, whom the report names with time and reason, whether this was intended. A reset to an "
        "earlier offset delivers the messages that still exist: notify group reset. With --fail-on LEFT_OUT they "
        "fail the audit.",
        rank=Rank.LATE,
        is_bad=False,
        names_groups=True,
        by_group=True,
        may_pass=True,
        when="is_left_out",
    ),
    Finding(
        "DROPPED",
        "A person dropped the message that its target refused: no consumer receives it.",
        "Nothing; who dropped it and why is in notify refused list --state DROPPED.",
        cause="{who}: {n} dropped by a person, {when}",
        rank=Rank.TRACE,
        is_bad=False,
        when="is_dropped",
    ),
    Finding(
        "WITHDRAWN",
        "Its sender, or a later message of its dedupe key, withdrew the delayed message in time: no consumer gets it.",
        "Nothing. The message's page and notify audit explain show when; the withdrawal is a message of its own.",
        cause="{who}: {n} withdrawn by the sender before their time, {when}",
        rank=Rank.TRACE,
        is_bad=False,
        when="is_withdrawn",
    ),
    Finding(
        "CORRUPT",
        "Bytes of the log differ from those that were written.",
        "Replace the disk; restore the log from a backup, or send the message again from the business data.",
        rank=Rank.LATE,
    ),
    Finding(
        "DISORDER",
        "An ordered group settled a later message of a key before an earlier one.",
        "Look for consumers that do not use the SDK, and for two instances with the same name.",
        cause="{who} settled {n}{of} out of order, {when}",
        rank=Rank.MESSAGE,
        names_groups=True,
        event=("settled_us", "effect_us"),
    ),
    Finding(
        "BRIDGE_GAP",
        "A bridge's positions are not contiguous: transactions that the source committed in between may be missing.",
        "Run notify bridge --backfill-from with a time before the gap: it takes the missing messages from the table.",
        cause="{who}: its bridge left {n}, {when}",
        rank=Rank.LATE,
        noun="gap",
    ),
    Finding(
        "ORPHAN_ROW",
        "A row without its counterpart: an inbox row of a message that is in no queue, or of a group that never "
        "subscribed to its topic, or a tombstone without a half.",
        "Harmless in itself; but a log may have been lost or replaced, or ids may have been made up.",
        cause="{who}: {n} with a row and without its counterpart, {when}",
        rank=Rank.TRACE,
        names_groups=True,
        may_pass=True,
        when="is_orphan AND is_closed OR strange_groups > 0",
    ),
    Finding(
        "ALTERED",
        "The local row differs from the message that was sent, in its body, key, tag, topic or producer group; or "
        "it is in another database than the one that the half came from.",
        "Find out who changed the row, or the message in transit; consumers handled the message as it is in the queue.",
        cause="{who}: {n}{of} whose local row differs from the message sent, {when}",
        rank=Rank.MESSAGE,
        when="is_altered",
    ),
    Finding(
        "MISDATED",
        "The time of a local row, or of a half in the log, differs from the time in its id by more than clocks and a "
        "long transaction can explain; or an inbox row is older than its message, or newer than its acknowledgement.",
        "Compare the clocks of producers, databases and server, or find out who changed the row.",
        cause="{who}: {n} whose local row and id have different times, {when}",
        rank=Rank.TRACE,
        when="is_misdated",
    ),
    Finding(
        "MALFORMED",
        "A row that no version of the SDK writes: its id is malformed, or its state is not known. The audit cannot use "
        "the row.",
        "Find out who wrote or changed the row, and correct it by hand.",
        cause="{who}: {n} that no version of the SDK writes, {when}",
        rank=Rank.TRACE,
        noun="row",
        when="is_malformed",
    ),
    Finding(
        "DEAD",
        "An unresolved dead letter: a group stopped trying to handle the message. Its effect did not happen "
        "there, unless the finding says that the inbox or --effects shows it.",
        "See why (the reasons are counted), fix the consumer, and send them again: notify dead-letter redrive; or "
        "purge them. With --fail-on DEAD they fail the audit.",
        rank=Rank.LATE,
        is_bad=False,
        names_groups=True,
    ),
    Finding(
        "FORGOTTEN",
        "An inbox row or a tombstone whose message the log lost with its disk: it was stored after the last shipped "
        "segment, and the log was restored without it.",
        "Nothing: the effect happened, or the transaction was rolled back. Messages that were published without a "
        "transaction may be lost without leaving a row.",
        cause="{who}: {n} with a row, lost by the log with its disk, {when}",
        rank=Rank.TRACE,
        is_bad=False,
        when="is_forgotten AND is_closed",
    ),
    Finding(
        "PENDING",
        "Not judged: prepared or committed a moment ago, or after the slowest input, or the missing record may lie in "
        "a part of the log that could not be read. The next audit decides.",
        "Nothing; if the log is not whole, restore the missing part.",
        cause="{who}: {n} not judged yet, {when}",
        rank=Rank.OPEN,
        is_bad=False,
        when=(
            "(is_lost OR is_unsent OR is_ghost OR is_in_doubt OR is_orphan OR is_conflict) AND NOT is_closed "
            "OR is_doubtful"
        ),
    ),
)
BY_NAME = {finding.name: finding for finding in FINDINGS}
BAD = [finding.name for finding in FINDINGS if finding.is_bad]
MAY_PASS = [finding.name for finding in FINDINGS if finding.may_pass]


def judged(rows: DataFrame, terms: Terms, groups: Groups) -> DataFrame:
    """Rows of messages with the columns of `facts`."""
    for step in facts(terms, groups):
        rows = rows.withColumns({name: F.expr(condition) for name, condition in step.items()})
    return rows


def judged_row(row: Mapping[str, Any], terms: Terms, groups: Groups) -> dict[str, Any]:
    """One row with the same columns, by SQLite instead of Spark: the value of each column, None if it is NULL."""
    values = dict(row)
    with closing(sqlite3.connect(":memory:")) as database:
        for name, arguments, function in _OF_SPARK:
            database.create_function(name, arguments, function, deterministic=True)
        for step in facts(terms, groups):
            given = ", ".join(f":{name} AS {name}" for name in values)
            wanted = ", ".join(f"{condition} AS {name}" for name, condition in step.items())
            found = database.execute(f"SELECT {wanted} FROM (SELECT {given})", values).fetchone()
            values |= dict(zip(step, found, strict=True))
    return values


_OF_SPARK: tuple[tuple[str, int, Callable[..., int | None]], ...] = (
    ("shiftright", 2, lambda value, bits: None if value is None else value >> bits),
    ("bit_count", 1, lambda value: None if value is None else (value & (1 << 64) - 1).bit_count()),
    ("greatest", -1, lambda *values: max((value for value in values if value is not None), default=None)),
)
"""Functions that Spark has and SQLite lacks: the name, the number of arguments (-1: any), and what it computes."""


def classes_of(classes: int) -> list[str]:
    """The names of the classes in a value of the column `classes`."""
    return [finding.name for finding in FINDINGS if classes & bit_of(finding.name)]


def facts(terms: Terms, groups: Groups) -> tuple[dict[str, str], ...]:
    """The columns that judge a message's row, as SQL that Spark and SQLite both understand.

    They come in steps: the conditions of a step use the columns of the row and of the steps before it. Besides the
    columns of spark.judge.message_rows a row has `made_us` and masks of groups: `expected0`, … should receive the
    message, `readers0`, … ever subscribed to its queue, it left the queues of `left0`, … unsettled, and the inboxes of
    `before_inbox0`, … began later. The last column, `classes`, has one bit for each of FINDINGS, in order.
    """
    number = f"shiftright(t_state, {DATABASE.bit_length() - 1})"
    parts = {
        "event_us": event_us(terms),
        "number": number,
        "other_number": number.replace("t_state", "other_state"),
        "state": f"coalesce(t_state, 0) & {UNKNOWN}",
        "unmoved": f"coalesce(shiftright(t_state, {UNMOVED.bit_length() - 1}), 0) & 3",
        "outcome": "coalesce(outcomes, 0)",
        "is_queued": "place IS NOT NULL",
        "has_half": "half_us IS NOT NULL",
        **_counts(terms, groups),
    }
    states = {
        "is_closed": f"event_us < {terms.closed_before_us}",
        "committed_here": f"state = {COMMITTED}",
        "tombstone": f"state = {ROLLED_BACK}",
        "committed_there": f"(outcome & {COMMITTED}) <> 0",
        "rolled_back_there": f"(outcome & {ROLLED_BACK}) <> 0",
        "is_covered": _is_covered(terms),
        "is_stranger": _is(_in("number", terms.strangers)),
        "waits_unsent": f"unmoved = {REFUSED} OR (unmoved = {WAITS} AND NOT {_passed(terms)}) "
        f"OR (outcome & {HALF_WAITS}) <> 0",  # a half in a storage waits, or was dropped
        "was_withdrawn": f"(outcome & {WITHDRAWN * MARKS}) <> 0",
        "takes_no_place": f"(outcome & {TAKES_NO_PLACE * MARKS}) <> 0",
        "was_dropped": f"unmoved = {DROPPED} OR (outcome & {HALF_DROPPED}) <> 0",
        "disk_lost": about("made_us", terms.lost, terms.slack_us),
        "is_late": f"coalesce(due_us, queued_us) < {terms.settled_before_us}",
    }
    outcomes = {
        "in_doubt": "has_half AND outcome = 0 AND NOT is_queued",
        "is_conflict": "(committed_here OR committed_there) AND rolled_back_there "
        "OR tombstone AND committed_there AND has_half OR was_withdrawn AND is_queued",
        # A delayed message that is not due yet is not in a queue.
        "waits": _is(f"committed_there AND NOT is_queued AND due_us >= {terms.closed_before_us}"),
        "is_alone": "NOT is_queued AND NOT committed_there AND NOT has_half AND outcome = 0 "
        f"AND ({_should_have(terms)}) AND {_made_since(terms.log_from_us)}",
        "without_half": "tombstone AND NOT has_half",
        **_beside(terms),
    }
    ghosts = {
        "absent": "committed_here AND NOT is_queued AND NOT is_conflict AND NOT in_doubt AND NOT waits "
        "AND NOT was_withdrawn AND NOT takes_no_place "
        f"AND event_us >= {terms.log_from_us}",
        "ghost": "(is_queued OR committed_there) AND producer_group IS NOT NULL AND NOT is_conflict AND (without_half "
        f"OR t_state IS NULL AND is_covered AND {_made_since(terms.rows_from_us)})",
    }
    missing = {
        "lost": "absent AND NOT waits_unsent AND NOT was_dropped",
        "orphan": "is_alone AND NOT disk_lost",
        "undelivered": "is_queued AND NOT is_conflict AND NOT ghost AND is_late AND missing_groups > 0",
        "left_out": "is_queued AND NOT is_conflict AND NOT ghost AND left_groups > 0",
    }
    # If the log has a hole, the missing record may have been there.
    conditions = {
        "is_in_doubt": "in_doubt AND NOT before_hole",
        "is_ghost": _is("ghost AND NOT (without_half AND after_hole)"),
        "is_lost": _is("lost AND NOT near_hole"),
        "is_unsent": _is("absent AND waits_unsent"),
        "is_dropped": _is("absent AND was_dropped"),
        "is_withdrawn": _is("was_withdrawn AND NOT is_queued"),
        "is_orphan": _is("orphan AND NOT after_hole"),
        "is_forgotten": _is("is_alone AND disk_lost"),
        "is_undelivered": _is("undelivered AND NOT before_hole"),
        "is_left_out": _is("left_out AND NOT before_hole"),
        "is_doubtful": _is(
            "lost AND near_hole OR in_doubt AND before_hole OR orphan AND after_hole "
            "OR ghost AND without_half AND after_hole OR (undelivered OR left_out) AND before_hole "
            "OR is_queued AND unseen_groups > 0"
        ),
        "is_altered": _is_altered(),
        "is_misdated": _is_misdated(terms.slack_us, groups),
        "is_malformed": f"state = {UNKNOWN}",
    }
    bits = [f"CASE WHEN {f.when} THEN {bit_of(f.name)} ELSE 0 END" for f in FINDINGS if f.when is not None]
    return parts, states, outcomes, ghosts, missing, conditions, {"classes": f"CAST({' + '.join(bits)} AS int)"}


def _is_covered(terms: Terms) -> str:
    """Whether a given database must have the local row of a transaction that it committed."""
    # Only the half says that a message is of no database. Retention may have deleted an older one from a storage.
    is_told = f"(has_half OR {_made_since(terms.halves_from_us)})"
    return f"coalesce(origin <> {ABROAD}, {_is(_in('producer_group', terms.covered_groups))} AND {is_told})"


def _should_have(terms: Terms) -> str:
    """Whether a row should have a counterpart in the log."""
    return f"tombstone AND {_made_since(terms.halves_from_us)} OR t_state IS NULL AND effect_us IS NOT NULL"


def _is_altered() -> str:
    """Whether a local row differs from the message that was sent, or is in another database than its half's."""
    is_moved = _is("number <> other_number OR origin >= 0 AND origin <> number")
    changed = " OR ".join(_is(f"{name} <> other_{name}") for name in ("topic", "digest", "producer_group"))
    return f"{is_moved} OR committed_here AND ({changed})"


def _is_misdated(slack_us: int, groups: Groups) -> str:
    """Whether a row has an impossible time, even if clocks differ.

    A local row and a half are written when the id is made; an inbox row is written later, but before its group
    acknowledges the message. `slack_us`: the longest time by which clocks and a transaction may separate these times.
    """
    off_us = "greatest(abs(t_us - made_us), abs(half_us - made_us), made_us - effect_us)"
    is_acked = " OR ".join(f"{_is(f'(acked{b} & effects{b}) <> 0')}" for b in range(groups.blocks))
    is_late = f"({is_acked}) AND effect_us - last_acked_us > {slack_us}"
    return f"{_is(f'{off_us} > {slack_us}')} OR {_is(is_late)}"


def _is(condition: str) -> str:
    """The condition; false if it is NULL."""
    return f"coalesce({condition}, false)"


def _in(value: str, values: Collection[int]) -> str:
    return f"{value} IN ({', '.join(map(str, sorted(values)))})" if values else "false"


def _passed(terms: Terms) -> str:
    """Whether the bridge of the row's database has passed the row. A bridge does not change the row itself."""
    passed = [f"number = {number} AND t_us <= {at_us}" for number, at_us in terms.bridged_us]
    return f"({' OR '.join(passed) or 'false'})"


def about(at_us: str, times: Sequence[tuple[int, int]], slack_us: int) -> str:
    """Whether an instant lies in one of some times (from, to), or within `slack_us` of it."""
    near = [f"{at_us} >= {from_us - slack_us} AND {at_us} <= {to_us + slack_us}" for from_us, to_us in times]
    return _is(" OR ".join(near) or "false")


def _beside(terms: Terms) -> dict[str, str]:
    """Whether an unreadable part of the log is so near that it may have had the message; whether the message comes
    after such a part, or its log was not given; and whether it comes before one."""
    slack_us, holes = terms.slack_us, terms.holes
    near = [about(at_us, holes, slack_us) for at_us in ("event_us", "due_us")]
    if terms.log_from_us:  # retention may have dropped the message
        near.append(f"event_us < {terms.log_from_us + slack_us}")
    after, before = "false", "false"
    if holes:
        first, last = min(from_us for from_us, _ in holes), max(to_us for _, to_us in holes)
        after, before = _is(f"event_us >= {first - slack_us}"), _is(f"event_us <= {last + slack_us}")
    return {
        "near_hole": " OR ".join([*near, "is_stranger"]),
        "after_hole": f"{after} OR is_stranger",
        "before_hole": before,
    }


def _made_since(us: int) -> str:
    """Whether, by its id, a transaction certainly began after the instant; 0: always true.

    Other times prove nothing: the effect or the place in a queue may be much later than the transaction.
    """
    return f"made_us >= {us + SKEW_US}" if us else "true"


def _counts(terms: Terms, groups: Groups) -> dict[str, str]:
    """For how many consumer groups something is wrong, by the masks of the row."""

    def count(mask_of: Callable[[int], str]) -> str:
        return " + ".join(f"bit_count({mask_of(block)})" for block in range(groups.blocks))

    def mask(name: str, block: int) -> str:
        return f"coalesce({name}{block}, 0)"

    def proven(block: int) -> str:
        return mask(PROVEN, block) if PROVEN in groups.masks else "0"

    def judged(block: int) -> str:
        return f"{groups.mask(sorted(terms.inbox_groups), block)} & ~{mask('before_inbox', block)}"

    def lacking(block: int) -> str:
        return f"{mask('acked', block)} & ~{mask('effects', block)} & {judged(block)}"

    def strange(block: int) -> str:
        receivers = " | ".join(mask(name, block) for name in ("expected", "settled", "attempted"))
        readers = f"coalesce(readers{block}, -1)"  # NULL: not known
        return f"{mask('effects', block)} & ~({receivers} | {readers})"

    effectless = count(lambda block: f"{lacking(block)} & ~{proven(block)}")
    # The inbox has no rows from before its last purge, so older acknowledgements prove nothing. Kafka does not say when
    # a message was acknowledged; the time at which the message got into its queue is a lower bound.
    in_time = f"coalesce(acked_us, queued_us) >= {terms.inbox_from_us}"
    until_us = terms.inbox_until_us
    unseen = f"coalesce(last_acked_us, {until_us}) >= {until_us}" if until_us else "false"
    return {
        "missing_groups": count(lambda block: f"{mask('expected', block)} & ~{mask('settled', block)}"),
        "effectless_groups": f"CASE WHEN {in_time} AND NOT ({unseen}) THEN {effectless} ELSE 0 END",
        "unseen_groups": f"CASE WHEN {in_time} AND {unseen} THEN {effectless} ELSE 0 END",
        "unguarded_groups": f"CASE WHEN {in_time} AND NOT ({unseen}) "
        f"THEN {count(lambda block: f'{lacking(block)} & {proven(block)}')} ELSE 0 END",
        "left_groups": count(lambda block: mask("left", block)),
        "attempted_groups": count(lambda block: mask("attempted", block)),
        "effect_groups": count(lambda block: mask("effects", block)),
        "strange_groups": f"CASE WHEN place IS NOT NULL THEN {count(strange)} ELSE 0 END",
    }


def bit_of(name: str) -> int:
    return 1 << FINDINGS.index(BY_NAME[name])


def has(*names: str) -> Column:
    """Whether one of these classes applies to a row."""
    return F.col("classes").bitwiseAND(sum(map(bit_of, names))) != 0
