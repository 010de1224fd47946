"""Whose a finding is: the consumer groups, the producer group and its database, the log or the source of a bridge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from notify.spark.judge.evidence import NOT_GIVEN
from notify.spark.judge.findings import BY_NAME
from notify.spark.result import Found

GROUP, PRODUCER, INPUT, BRIDGE = "group", "producer", "input", "bridge"


@dataclass(frozen=True, order=True)
class Subject:
    """One subject of a class of findings."""

    finding: str
    kind: str
    """GROUP, PRODUCER, INPUT or BRIDGE."""
    name: str
    """The group's, the input's or the source's; "" if it is not known."""
    place: str = ""
    """PRODUCER: the database that the messages came from."""
    state: str = ""
    """UNDELIVERED: see spark.causes.grouping."""

    def __str__(self) -> str:
        if self.kind == GROUP:
            return f"group {self.name}" if self.name else f"database {self.place}"
        if self.kind == PRODUCER:
            name = f"producer group {self.name}" if self.name else "a sender without a producer group"
            return f"{name}, {self.place}" if self.place else name
        return f"source {self.name}" if self.kind == BRIDGE else self.name


def subjects_of(case: Found) -> Iterator[Subject]:
    """The subjects of a case: a message may concern several groups."""
    if case.finding == "BRIDGE_GAP":
        yield Subject(case.finding, BRIDGE, case.evidence.get("source", ""))
    elif case.finding == "CORRUPT":
        yield Subject(case.finding, INPUT, case.log if case.log.startswith("kafka ") else f"log {case.log}")
    elif case.groups and (BY_NAME[case.finding].names_groups or not case.producer_group):
        for group in case.groups:
            yield Subject(case.finding, GROUP, group)
    elif case.finding == "DUP_EFFECT":
        yield Subject(case.finding, GROUP, "", case.database)
    else:
        yield Subject(case.finding, PRODUCER, case.producer_group, _place(case))


def _place(case: Found) -> str:
    name = case.evidence.get("sent_from") or case.database
    if name == NOT_GIVEN:
        source = case.evidence.get("source")
        return f"source {source}" if source else NOT_GIVEN
    return f"database {name}" if name else ""


def instant_of(case: Found) -> int:
    """When it happened, in microseconds since 1970; 0: not known."""
    for name in BY_NAME[case.finding].event:
        if case.evidence.get(name):
            return int(case.evidence[name])
    return case.at_us
