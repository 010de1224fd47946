"""A cause in one sentence: whose, since when, and how many messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from notify.runtime.visible import first_of
from notify.spark.causes.settled import BEHIND, STILL, Standstill
from notify.spark.causes.stretches import Stretch
from notify.spark.causes.subjects import Subject
from notify.spark.judge.findings import BY_NAME
from notify.spark.result import Found
from notify.spark.times import instant_text

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
