"""Groups an audit's findings into causes, and puts those first that matter most to the business."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from notify.runtime.visible import first_of
from notify.spark.causes.cause import Cause
from notify.spark.causes.commands import Commands
from notify.spark.causes.settled import BEHIND, STILL, Standstill, last_settled
from notify.spark.causes.stretches import Stretch, stretches_of
from notify.spark.causes.subjects import GROUP, Subject, instant_of, subjects_of
from notify.spark.judge.findings import BY_NAME, Rank
from notify.spark.result import Found, Inputs, Plan, Result
from notify.spark.times import instant_text

MOST = 20
"""The most causes that are told one by one."""
INCONCLUSIVE = "INCONCLUSIVE"
_SUMMED = ("DEAD", "LEFT_OUT")
"""Classes that the audit has summed up itself."""


def tell_causes(spark: SparkSession, plan: Plan, inputs: Inputs, result: Result, commands: Commands) -> None:
    """Set the causes of an audit's result. The inputs are those of the audit, and still open."""
    queues = [entry["watermark_us"] for entry in result.inputs if entry["kind"] in ("log", "kafka")]
    until_us = min([*queues, result.to_us])
    last = last_settled(spark, inputs, result.found)
    standstill = Standstill(last, until_us - round(plan.deliver_seconds * 1e6))
    result.causes, result.causes_left = causes_of(result, standstill, commands)


def causes_of(result: Result, standstill: Standstill, commands: Commands) -> tuple[list[Cause], int]:
    """The causes of a result, what matters most first, and how many more there are.

    What is repaired, pending, or harmless has none.
    """
    causes = [*_of_cases(result, standstill, commands), *_of_letters(result, commands)]
    causes += _of_left_out(result, commands)
    causes += [_of_reason(reason, commands) for reason in result.reasons]
    causes.sort(key=lambda cause: (_rank_of(cause), -cause.count, cause.from_us, cause.sentence))
    return causes[:MOST], len(causes[MOST:])


def _rank_of(cause: Cause) -> Rank:
    return Rank.LATE if cause.finding == INCONCLUSIVE else BY_NAME[cause.finding].rank


def _of_cases(result: Result, standstill: Standstill, commands: Commands) -> Iterator[Cause]:
    shown: dict[str, int] = defaultdict(int)
    by_subject: dict[Subject, list[tuple[int, Found]]] = defaultdict(list)
    for case in result.found:
        if case.finding not in result.bad or case.finding in _SUMMED or case.evidence.get("repaired"):
            continue
        shown[case.finding] += 1
        for subject in subjects_of(case):
            by_subject[standstill.with_state(subject, case)].append((instant_of(case), case))
    for subject, cases in by_subject.items():
        is_whole = shown[subject.finding] >= result.counts.get(subject.finding, 0)
        together = [Stretch(sorted(cases, key=lambda c: c[0]))] if subject.state == STILL else stretches_of(cases)
        for stretch in together:
            sentence = sentence_of(subject, stretch, standstill, is_whole=is_whole)
            yield _cause(subject, stretch, sentence, commands.of(subject, stretch))


def _cause(subject: Subject, stretch: Stretch, sentence: str, commands: tuple[str, ...]) -> Cause:
    first = next((case.message_id for _, case in stretch.cases if case.message_id), "")
    count = len(stretch.cases)
    times = (stretch.from_us, stretch.to_us)
    return Cause(
        subject.finding, sentence, count, str(subject), *times, fails=True, message_id=first, commands=commands
    )


def _of_letters(result: Result, commands: Commands) -> Iterator[Cause]:
    """Dead letters by group; their counts are exact, whatever number of them is shown."""
    by_group: dict[str, list[Mapping[str, object]]] = defaultdict(list)
    for row in result.dead:
        by_group[row["group"]].append(row)
    for group, rows in by_group.items():
        letters = [(instant_of(f), f) for f in result.found if f.finding == "DEAD" and group in f.groups]
        stretch = Stretch(sorted(letters, key=lambda letter: letter[0]))
        subject = Subject("DEAD", GROUP, group)
        count = sum(int(str(row["count"])) for row in rows)
        sentence = dead_sentence(group, rows, stretch, count)
        times = (stretch.from_us, stretch.to_us if letters else 0)
        first = letters[0][1].message_id if letters else ""
        fails = "DEAD" in result.bad
        yield Cause("DEAD", sentence, count, str(subject), *times, fails, first, commands.of(subject, stretch))


def _of_left_out(result: Result, commands: Commands) -> Iterator[Cause]:
    """Messages that left queues unsettled, by group, topic and cause."""
    is_whole = sum(case.finding == "LEFT_OUT" for case in result.found) >= result.counts.get("LEFT_OUT", 0)
    for row in result.left_out:
        subject = Subject("LEFT_OUT", GROUP, row["group"])
        sentence = left_out_sentence(row, is_whole=is_whole)
        first = Found("LEFT_OUT", *_identity(row["message_id"]), at_us=row["at_us"])
        stretch = Stretch([(row["at_us"], first)])
        yield Cause(
            "LEFT_OUT", sentence, row["messages"], str(subject), row["at_us"], row["until_us"],
            "LEFT_OUT" in result.bad, row["message_id"], commands.of(subject, stretch),
        )  # fmt: skip


def _identity(message_id: str) -> tuple[str, int]:
    transaction, _, number = message_id.partition(".")
    return transaction, int(number or 0)


def _of_reason(reason: str, commands: Commands) -> Cause:
    return Cause(INCONCLUSIVE, reason, 0, "", 0, 0, False, "", commands.again())


NAMED = 3
"""The most topics, or reasons, that a sentence names."""
REASON_CHARACTERS = 80


def sentence_of(subject: Subject, stretch: Stretch, standstill: Standstill, *, is_whole: bool) -> str:
    """`is_whole`: whether all findings of the class are known one by one; otherwise their number is a lower bound."""
    cases = [case for _, case in stretch.cases]
    least = "" if is_whole else "at least "
    if subject.finding == "UNDELIVERED":
        return _undelivered(subject, stretch, standstill, least)
    if subject.finding == "CORRUPT":
        return _corrupt(subject, stretch, least)
    finding = BY_NAME[subject.finding]
    n = _number(len(cases), finding.noun, least)
    return finding.cause.format(who=str(subject), n=n, of=_of_topics(cases), when=_when(stretch))


def _undelivered(subject: Subject, stretch: Stretch, standstill: Standstill, least: str) -> str:
    cases = [case for _, case in stretch.cases]
    last_us = standstill.last_us(subject.name, cases)
    n, of_topics = _number(len(cases), "message", least), _of_topics(cases)
    verb = "is" if len(cases) == 1 else "are"
    if subject.state == STILL:
        where = "" if standstill.is_still(subject.name) else " there"
        what = f"has been stuck{where} since" if last_us else f"has settled nothing{where} since"
        return f"{subject} {what} {instant_text(last_us or stretch.from_us)}: {n}{of_topics} {verb} undelivered"
    if subject.state == BEHIND:
        return (
            f"{subject} is behind: {n}{of_topics}, {_when(stretch, 'queued ')}, {verb} undelivered; "
            f"its last settlement was at {instant_text(last_us)}"
        )
    return f"{subject} left out {n}{of_topics}, {_when(stretch, 'queued ')}: it settled later ones"


def _corrupt(subject: Subject, stretch: Stretch, least: str) -> str:
    places = [case.evidence for _, case in stretch.cases if "position" in case.evidence]
    where = f" from byte {places[0]['position']} to {max(p['end'] for p in places)}" if places else ""
    if not places:
        first = stretch.cases[0][1]
        where = f", the first at {first.topic}/{first.queue}@{first.offset}"
    return f"{subject}: {_number(len(stretch.cases), 'damaged place', least)}{where}, {_when(stretch, 'written ')}"


def dead_sentence(group: str, rows: Sequence[Mapping[str, object]], stretch: Stretch, count: int) -> str:
    """For a group's dead letters; `rows`: their reasons and counts, the most frequent first."""
    reasons = ", ".join(f"{row['count']:,} × {str(row['reason'])[:REASON_CHARACTERS]!r}" for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more reasons" if len(rows) > NAMED else ""
    since = f" since {instant_text(stretch.from_us)}" if stretch.cases else ""
    messages = _number(count, "message", "")
    return f"group {group} gave up {messages}{since} that were not redriven: {reasons}{more}"


def left_out_sentence(row: Mapping[str, Any], *, is_whole: bool) -> str:
    """For a row of Result.left_out. `is_whole`: whether all messages of the class are known one by one."""
    messages = _number(row["messages"], "message", "" if is_whole else "at least ")
    of_topic = f" of topic {row['topic']}" if row["topic"] else ""
    return f"group {row['group']} never settled {messages}{of_topic}: {row['why']}"


def _number(count: int, noun: str, least: str) -> str:
    return f"{least}{count:,} {noun}{'' if count == 1 else 's'}"


def _of_topics(cases: Iterable[Found]) -> str:
    topics = sorted({case.topic for case in cases if case.topic})
    if not topics:
        return ""
    if len(topics) == 1:
        return f" of topic {topics[0]}"
    return f" of topics {first_of(topics, NAMED)}"


def _when(stretch: Stretch, what: str = "") -> str:
    """The time of a stretch in words."""
    if not stretch.to_us:
        return "at a time that is not known"
    first, last = instant_text(stretch.from_us), instant_text(stretch.to_us)
    if first == last:
        return f"{what}at {first}"
    parts = f" in {stretch.parts} stretches" if stretch.parts > 1 else ""
    return f"{what}between {first} and {last}{parts}"
