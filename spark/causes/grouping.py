"""Groups an audit's findings into causes, and puts those first that matter most to the business."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from pyspark.sql import SparkSession

from notify.spark.causes.cause import Cause
from notify.spark.causes.commands import Commands
from notify.spark.causes.sentences import dead_sentence, left_out_sentence, sentence_of
from notify.spark.causes.settled import STILL, Standstill, last_settled
from notify.spark.causes.stretches import Stretch, stretches_of
from notify.spark.causes.subjects import GROUP, Subject, instant_of, subjects_of
from notify.spark.judge.findings import BY_NAME, Rank
from notify.spark.result import Found, Inputs, Plan, Result

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
