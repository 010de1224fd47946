"""Messages that left a group's queue without being settled: by what, who did it, when and why.

What left its queue by a change of subscriptions or topics is a condition on a message's row (spark.findings). What
expired, and dead letters that were dropped or purged, are searched here. Who did it is in the servers' records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import NotifyError
from notify.protocol import ids
from notify.protocol.filter import Filter
from notify.protocol.wire import decode_payload
from notify.spark.checks import searches
from notify.spark.explain.trace import Stand, Trace
from notify.spark.inputs import changes
from notify.spark.inputs.actions import NOBODY_KNOWS, Record, recorded
from notify.spark.inputs.changes import Left
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.effects import BusinessEffects
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.ranges import Span
from notify.spark.repair.current_state import NONE, effects_of
from notify.spark.result import Found, Inputs, Result
from notify.spark.times import instant_text
from notify.storage.groups import SettleKind, Subscription
from notify.storage.names import dead_letter_topic
from notify.storage.sql.administration import server_action

NAME = "LEFT_OUT"
MOST_RECORDS = 10_000
"""The most records of one server that are looked at, the newest first."""
BEFORE_US = 60_000_000
"""An action is recorded before it is carried out, and carried out within this time."""
AFTER_US = 1_000_000
BACKLOG = "backlog full"
"""How messages left that a topic dropped by itself."""
_ACTIONS = {
    changes.RESET: "group.reset",
    changes.UNSUBSCRIBED: "subscription.delete",
    changes.DELETED: "topic.delete",
    changes.TRIMMED: "topic.purge",
    changes.LETTER_PURGED: "dead_letter.purge",
    changes.LETTER_DROPPED: "dead_letter.drop",
    changes.LETTERS_DELETED: "topic.delete",
}
_POLICY = "topic.put"
_SEARCHED = (changes.EXPIRED, changes.LETTER_PURGED, changes.LETTER_DROPPED, changes.LETTERS_DELETED)
_ONE_BY_ONE = (changes.EXPIRED, changes.LETTER_DROPPED, BACKLOG)
_SENTENCES = {
    changes.RESET: "a reset skipped {it} {when}",
    changes.UNSUBSCRIBED: "the subscription ended {when}",
    changes.DELETED: "the topic was deleted {when}",
    changes.TRIMMED: "the topic was purged {when}",
    changes.EXPIRED: "{it} expired {when}",
    changes.LETTER_PURGED: "the dead letters were purged {when}",
    changes.LETTER_DROPPED: "{its} dead letter was dropped {when}",
    changes.LETTERS_DELETED: "the topic of the dead letters was deleted {when}",
    BACKLOG: "the backlog was full, and the topic dropped the oldest messages {when}",
}


@dataclass(frozen=True)
class Why:
    """The cause by which messages left, and who did it. Instants are in microseconds since 1970."""

    how: str
    at_us: int
    until_us: int
    record: Record | None
    """Who did it and why; of a backlog and of what expired: who gave the topic that policy. None: not known."""

    def sentence(self, it: str = "it", its: str = "its") -> str:
        """In words."""
        first, last = instant_text(self.at_us), instant_text(self.until_us)
        when = f"at {first}" if first == last else f"between {first} and {last}"
        text = _SENTENCES[self.how].format(it=it, its=its, when=when)
        if self.how in (BACKLOG, changes.EXPIRED):
            return f"{text}; the topic got this policy {self.record.by}" if self.record else f"{text}; {_NO_POLICY}"
        return f"{text}, {self.record.by if self.record else NOBODY_KNOWS}"


_NO_POLICY = "who set that is in no record that was given"


class Reasons:
    """Looks up what the records of servers say about changes."""

    def __init__(self, inputs: Inputs) -> None:
        whats = [*_ACTIONS.values(), _POLICY]
        self._records = recorded(inputs, server_action.c.what.in_(whats), MOST_RECORDS)

    def of(self, left: Left, topic: str, offset: int, source: str, dropping: bool = False) -> Why:
        """Why a message at this offset left. `topic`: the topic's name. `source`: the input, such as `log data`.

        `dropping`: the topic may have dropped its oldest messages by itself.
        """
        target = {
            changes.RESET: f"{left.group}/{topic}", changes.UNSUBSCRIBED: f"{left.group}/{topic}",
            changes.LETTER_PURGED: left.group, changes.LETTER_DROPPED: left.group,
            changes.LETTERS_DELETED: dead_letter_topic(left.group),
        }.get(left.how, topic)  # fmt: skip
        how, at_us, until_us, record = left.how, left.at_us, left.until_us, None
        from_us, to_us = at_us - BEFORE_US, until_us + AFTER_US
        if left.reset:  # consumers over Kafka carry it out once they run, and date it by their clocks
            from_us, to_us = 0, changes.END
        near = self._of(_ACTIONS.get(how, ""), target, source, from_us, to_us)
        if how == changes.EXPIRED:
            record = self._policy(topic, source, at_us, "ttl")
        elif how in (changes.TRIMMED, changes.LETTER_PURGED):
            # A full backlog may have been trimmed shortly before and after a person purged the topic.
            record = next((r for r in reversed(near) if _purged(r, left.queue, offset)), None)
            if record is None and dropping and how == changes.TRIMMED:
                how, record = BACKLOG, self._policy(topic, source, at_us, "backlog")
            elif record is not None:
                at_us = until_us = record.at_us
        elif left.reset:
            record = next((r for r in near if _result(r).get("id") == left.reset), None)
        elif near:
            record = near[-1]
        return Why(how, at_us, until_us, record)

    def of_letter(self, group: str, letter_id: str, at_us: int, source: str) -> Record | None:
        """Who dropped a dead letter: the record that names it, or that of all letters which match."""
        drops = self._of(_ACTIONS[changes.LETTER_DROPPED], group, source, 0, changes.END)
        named = [record for record in drops if record.names(letter_id)]
        before = [record for record in drops if record.at_us <= at_us + AFTER_US]
        chosen = named or before
        return chosen[-1] if chosen else None

    def _of(self, what: str, target: str, source: str, from_us: int, to_us: int) -> list[Record]:
        """Records of the server itself, or of a storage that several servers share, the oldest first."""
        return [
            r
            for r in self._records
            if (r.what, r.target) == (what, target[:255])
            and from_us <= r.at_us <= to_us
            and (r.source == source or not r.source.startswith("log "))
        ]

    def _policy(self, topic: str, source: str, at_us: int, name: str) -> Record | None:
        """Who gave a topic the policy that it had at an instant."""
        puts = self._of(_POLICY, topic, source, 0, at_us + AFTER_US)
        return next((record for record in reversed(puts) if _result(record).get(name)), None)


def _result(record: Record) -> Mapping[str, object]:
    try:
        result = json.loads(record.result)
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def _purged(record: Record, queue: int, offset: int) -> bool:
    """Whether a purge was to drop this offset; also true while only its beginning is recorded."""
    rows = _result(record).get("queues")
    if not isinstance(rows, list):
        return True
    return any(row.get("queue", 0) == queue and row.get("from", 0) <= offset < row.get("to", 0) for row in rows)


# --- searches -------------------------------------------------------------------------------------------------------


def expired(spark: SparkSession, log: LogInput, span: Span | None) -> tuple[list[Found], int]:
    """Messages that expired before a group settled them, and the number of all. `span`: the audited ids."""
    acks = log.expired(spark)
    if acks is None:
        return [], 0
    names = {name_hash(group): group for group in log.groups()}
    rows = acks.where(F.col("consumer_group").isin(list(names))).where(F.col("id").isNotNull())
    by_message = searches.within(rows, span).groupBy("id", "no").agg(
        F.collect_set("consumer_group").alias("groups"), F.min("at_us").alias("at_us"),
        F.max("at_us").alias("until_us"), F.min("queued_us").alias("queued_us"), F.first("topic").alias("topic"),
        F.first("queue").alias("queue"), F.first("offset").alias("offset"),
    )  # fmt: skip
    found, count = searches.most_of(by_message)
    cases = []
    for row in found:
        groups = sorted(names[each] for each in row["groups"] if "@" not in names[each])
        if not groups:
            count -= 1
            continue
        offset = row["offset"]
        times = (row["at_us"], row["until_us"])
        left = tuple(
            Left(changes.EXPIRED, group, row["topic"], row["queue"], offset, offset + 1, *times, None)
            for group in groups
        )
        cases.append(
            Found(
                NAME, ids.to_text(bytes(row["id"])), row["no"], "", log.catalog.topics.get(row["topic"], ""),
                row["queue"], offset, "", groups, row["queued_us"], "", log.name,
                {"queued_us": row["queued_us"], "expired_us": row["at_us"]}, left,
            )
        )  # fmt: skip
    return cases, count


def letters(log: LogInput, gone: DataFrame) -> tuple[list[Found], int]:
    """Dead letters that were dropped or purged, and the number of all.

    `gone`: rows of spark.letters.LETTERS with `noted_us`, when the letter was dropped; null: it was purged.
    """
    rows, count = searches.most_of(gone.orderBy("at_us", "id", "no"))
    cases = []
    for row in rows:
        is_dropped = row["noted_us"] is not None
        if is_dropped:
            how, at_us = changes.LETTER_DROPPED, row["noted_us"]
        else:
            how, at_us = _gone(log, row["topic"], row["queue"], row["offset"])
        left = Left(how, row["group"], row["topic"], row["queue"], row["offset"], row["offset"] + 1, at_us, at_us, None)
        cases.append(
            Found(
                NAME, ids.to_text(bytes(row["id"])), row["no"], "", row["name"] or "", row["queue"], row["offset"],
                "", [row["group"]], row["at_us"], "", log.name, {"reason": row["reason"]}, (left,),
            )
        )  # fmt: skip
    return cases, count


def _gone(log: LogInput, topic: int, queue: int, offset: int) -> tuple[str, int]:
    """How and when a group's dead letter was purged, or its topic deleted; at 0: it was not."""
    trims = log.catalog.changes.trims(topic, queue)
    at_us = next((at_us for at_us, end in trims if offset < end), 0)
    if not at_us and topic in log.deleted:
        return changes.LETTERS_DELETED, log.deleted[topic]
    return changes.LETTER_PURGED, at_us


# --- who, when and why ----------------------------------------------------------------------------------------------


def tell(spark: SparkSession, inputs: Inputs, result: Result, effects: Sequence[BusinessEffects] = ()) -> None:
    """Say in each case of LEFT_OUT by what the message left, who did it and why; and sum up the cases.

    A message that a group's tags or filter exclude was not for the group, and is not a case; nor is one that took
    effect, as the group's inbox or one of `effects` shows.
    """
    cases = [case for case in result.found if case.finding == NAME]
    if not cases:
        return
    chooser = _Chooser(inputs, cases, result)
    for kafka in inputs.kafka:
        if over_kafka := chooser.over_kafka(cases):
            chooser.tags |= kafka.tags(spark, over_kafka)
    # The rows of messages have shown the effects of all others already.
    happened = effects_of(inputs.databases, [case.message_id for case in cases if _is_searched(case)], effects)
    ineffective = [_without(case, happened.get(case.message_id, NONE).groups) for case in cases]
    kept = [case for case in map(chooser.chosen, ineffective) if case.groups]
    result.counts[NAME] -= len(cases) - len(kept)
    result.found = [case for case in result.found if case.finding != NAME] + kept
    reasons = Reasons(inputs)
    sums: dict[tuple[str, str, Why], list[tuple[Why, Found]]] = {}
    for case in kept:
        whys = [_why(inputs, reasons, case, left) for left in case.left]
        case.of_groups = tuple(
            f"not settled by {group}: {why.sentence()}" for group, why in zip(case.groups, whys, strict=True)
        )
        case.detail = "; ".join(case.of_groups)
        for group, why in zip(case.groups, whys, strict=True):
            # Changes that come message by message are one finding.
            kind = replace(why, at_us=0, until_us=0) if why.how in _ONE_BY_ONE else why
            sums.setdefault((group, case.topic, kind), []).append((why, case))
    result.left_out = sorted(
        (_row(group, topic, why, of_it) for (group, topic, why), of_it in sums.items()),
        key=lambda row: (-row["messages"], row["at_us"], row["group"], row["topic"]),
    )


def _is_searched(case: Found) -> bool:
    """Whether the case is one of `expired` or `letters`."""
    return any(left.how in _SEARCHED for left in case.left)


def _without(case: Found, groups: frozenset[str]) -> Found:
    """The case without these groups."""
    left = tuple(each for each in case.left if each.group not in groups)
    return case if len(left) == len(case.left) else replace(case, groups=[each.group for each in left], left=left)


def of_trace(inputs: Inputs, trace: Trace, again: Mapping[str, bool]) -> dict[str, str]:
    """By group, what one message left its queue by, who did it and why.

    `again`: the groups to which it was sent again, and whether its dead letter was dropped instead.
    """
    happened = trace.effects.keys() | trace.proven
    gone = {
        group: (left, stand)
        for group, (left, stand) in trace.left.items()
        # Over Kafka a group that was moved has settled all that it skipped, as far as its offset tells.
        if group not in happened | trace.expected and (left.reset or group not in trace.settled)
    }
    for group, settled in trace.settled.items():
        if settled.kind == SettleKind.EXPIRED.name and trace.stands and group not in happened:
            at_us = settled.at_us
            gone[group] = Left(changes.EXPIRED, group, 0, 0, 0, 1, at_us, at_us, None), trace.stands[0]
    for group, stands in trace.letters.items():
        for stand in stands if again.get(group, True) else ():
            how, at_us = changes.LETTER_DROPPED, stand.queued_us
            if group not in again:
                how, at_us = _gone_from(inputs, stand)
            if at_us and group in happened:
                trace.let_go.add(group)
            elif at_us:
                gone[group] = Left(how, group, 0, stand.queue, 0, 1, at_us, at_us, None), stand
    if not gone:
        return {}
    transaction, number = ids.parse_message_id(trace.message_id)
    lefts = tuple(left for left, _ in gone.values())
    case = Found(NAME, ids.to_text(transaction), number, groups=list(gone), left=lefts)
    reasons, told = Reasons(inputs), {}
    for group, (left, stand) in gone.items():
        case = replace(
            case, topic=stand.topic, queue=stand.queue, offset=stand.offset, log=stand.source.removeprefix("log "),
            groups=[group], left=(left,),
        )  # fmt: skip
        if left.reset:
            case = replace(case, log="")
        if _Chooser(inputs, [case], Result()).chosen(case).groups:
            told[group] = _why(inputs, reasons, case, left).sentence()
    return told


def _gone_from(inputs: Inputs, stand: Stand) -> tuple[str, int]:
    """As `_gone`, of a dead letter's place."""
    for log in inputs.logs:
        numbers = [number for number, name in log.catalog.topics.items() if name == stand.topic]
        if f"log {log.name}" == stand.source and numbers:
            return _gone(log, numbers[-1], stand.queue, stand.offset)
    return changes.LETTER_PURGED, 0


def _row(group: str, topic: str, why: Why, cases: Sequence[tuple[Why, Found]]) -> dict[str, Any]:
    record = why.record
    times = [(each.at_us, each.until_us) for each, _ in cases]
    why = replace(why, at_us=min(at_us for at_us, _ in times), until_us=max(until_us for _, until_us in times))
    _, first = min(cases, key=lambda pair: pair[1].at_us)
    return {
        "group": group, "topic": topic, "messages": len(cases), "how": why.how, "at_us": why.at_us,
        "until_us": why.until_us, "who": record.who if record else None, "reason": record.reason if record else None,
        "record": record.source if record else "", "message_id": first.message_id,
        "why": why.sentence("them", "their"),
    }  # fmt: skip


def _why(inputs: Inputs, reasons: Reasons, case: Found, left: Left) -> Why:
    source = f"log {case.log}" if case.log else ""
    if left.how == changes.LETTER_DROPPED:
        record = reasons.of_letter(left.group, case.message_id, left.at_us, source)
        return (
            Why(left.how, record.at_us, record.at_us, record) if record else Why(left.how, left.at_us, left.at_us, None)
        )
    if left.how == changes.EXPIRED:
        return replace(reasons.of(left, case.topic, left.first, source), at_us=left.at_us, until_us=left.until_us)
    dropping = any(log.name == case.log and left.topic in log.catalog.dropping for log in inputs.logs)
    return reasons.of(left, case.topic, case.offset or 0, source, dropping)


class _Chooser:
    """Leaves those groups out of a case whose tags or filter exclude its message."""

    def __init__(self, inputs: Inputs, cases: Iterable[Found], result: Result) -> None:
        choosing = [case for case in cases if any(_chooses(left.subscription) for left in case.left)]
        self._payloads: dict[tuple[bytes, int], bytes] = {}
        for log in inputs.logs if choosing else ():
            wanted = {ids.from_text(case.transaction_id) for case in choosing if case.log == log.name}
            for transaction, number, payload in log.payloads(wanted) if wanted else ():
                self._payloads[bytes(transaction), number] = payload
        self.tags: dict[tuple[bytes, int], str | None] = {}
        """The tags of messages whose content was not read."""
        self._filters: dict[str, Filter | None] = {}
        self._result = result
        if len(choosing) >= searches.MOST_FINDINGS:
            result.notes.append(
                "LEFT_OUT may count messages that the tags or filters of groups exclude: there are too many to look at"
            )

    @staticmethod
    def over_kafka(cases: Iterable[Found]) -> set[bytes]:
        """The transactions of messages in Kafka whose tags are needed."""
        tagged = [c for c in cases if not c.log and any(s.tags for left in c.left if (s := left.subscription))]
        return {ids.from_text(case.transaction_id) for case in tagged}

    def chosen(self, case: Found) -> Found:
        """The case with those of its groups that were to receive the message."""
        return _without(case, frozenset(left.group for left in case.left if not self._takes(case, left.subscription)))

    def _takes(self, case: Found, subscription: Subscription | None) -> bool:
        """Whether the group was to receive the message; also true if its content is not known."""
        if subscription is None or not _chooses(subscription):
            return True
        message = (ids.from_text(case.transaction_id), case.message_no)
        payload = self._payloads.get(message)
        if payload is None:
            return not subscription.tags or self.tags.get(message, subscription.tags[0]) in subscription.tags
        try:
            if subscription.tags and decode_payload(payload).tag not in subscription.tags:
                return False
            chosen = self._filter(subscription.filter)
            return chosen is None or chosen.matches(payload)
        except (msgspec.MsgspecError, ValueError):
            return True

    def _filter(self, text: str) -> Filter | None:
        if text not in self._filters:
            try:
                self._filters[text] = Filter(text) if text else None
            except NotifyError as error:
                self._filters[text] = None
                self._result.notes.append(f"LEFT_OUT counts messages that the filter {text!r} may exclude: {error}")
        return self._filters[text]


def _chooses(subscription: Subscription | None) -> bool:
    return subscription is not None and bool(subscription.tags or subscription.filter)
