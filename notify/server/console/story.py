"""A message's story as a drawing to scale: a lane for its transaction and one for each group, with bars and marks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from notify.admin_api.words import latency

LINEAR, LOGARITHMIC = "linear", "logarithmic"
LEAST_SECONDS = 0.001
"""The time that a logarithmic scale shows first."""
CROWDED_SHARE = 0.005
"""Two events this close on the scale, as a share of its length, cannot be told apart."""
MOST_TICKS = 5
LEAST_APART = 14.0
"""Percent of the scale between two ticks at least, so that their labels do not touch on a phone."""
MOST_LANES = 50
"""The most groups that are drawn; the list of events has all."""
_STEPS = (
    *(base * 10.0**power for power in range(-4, 1) for base in (1, 2, 5)),
    10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 18_000.0, 43_200.0, 86_400.0,
    172_800.0, 432_000.0, 864_000.0,
)  # fmt: skip
"""Seconds between two ticks of a linear scale; those of a logarithmic one are some of them."""
_DECADES = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0, 86_400.0, 864_000.0)
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}\Z")
_GOOD, _BAD = ("acknowledged",), ("failed", "died", "dead_letter", "damaged")
_ENDS = ("acknowledged", "filtered", "expired", "damaged", "redriven", "dropped")


class Bar(NamedTuple):
    """A time in a lane, from and to a share of the scale in percent. `kind`: doubt, wait, work, failed or dead."""

    kind: str
    left: float
    width: float
    words: str


class Mark(NamedTuple):
    """An event in a lane. `kind`: good, bad or plain."""

    kind: str
    left: float
    words: str


@dataclass(slots=True)
class Lane:
    """The bars and marks of a group, or of the transaction."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


class Story(NamedTuple):
    """The drawing. `ticks`: shares of the scale in percent, and the times since the first event there. `left_out`: how
    many groups have no lane."""

    lanes: list[Lane]
    ticks: list[tuple[float, str]]
    scale: str
    other_scale: str
    seconds: float
    left_out: int


def drawn(life: Mapping[str, Any], scale: str = "") -> Story | None:
    """The drawing of the admin route's answer about a message; None if everything happened at one instant.

    `scale`: linear or logarithmic; another text chooses: linear, unless most events could not be told apart then.
    """
    events = life["timeline"]
    if not events:
        return None
    times = [_seconds(event["at"]) for event in events]
    begin, end = times[0], _seconds(life["at"]) if _is_open(life) else times[-1]
    if end <= begin:
        return None
    if scale not in (LINEAR, LOGARITHMIC):
        scale = LOGARITHMIC if _is_crowded(times, end - begin) else LINEAR
    place = _places(scale, end - begin)
    draw = _Drawing(lambda at: place(at - begin), end)
    groups = _groups(life)
    lanes = list(draw.lanes(life, groups[:MOST_LANES], list(zip(times, events, strict=True))))
    ticks: list[tuple[float, str]] = []
    for seconds in _ticks(scale, end - begin):
        at = round(place(seconds), 2)
        if not ticks or at - ticks[-1][0] >= LEAST_APART:
            ticks.append((at, latency(seconds)))
    other_scale = LINEAR if scale == LOGARITHMIC else LOGARITHMIC
    return Story(lanes, ticks, scale, other_scale, end - begin, len(groups) - len(groups[:MOST_LANES]))


def trace_id(headers: Mapping[str, str] | None) -> str:
    """The id of the trace that a message belongs to; empty if its headers name none."""
    match = _TRACE.match((headers or {}).get("traceparent", ""))
    return "" if match is None else match.group(1)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _groups(life: Mapping[str, Any]) -> list[str]:
    """The groups with an event, in order, and those that have not settled the message."""
    with_event = dict.fromkeys(event["group"] for event in life["timeline"] if "group" in event)
    return list(with_event | dict.fromkeys(row["group"] for row in life["groups"] if row["state"] != "settled"))


def _is_open(life: Mapping[str, Any]) -> bool:
    """Whether the story is not over: something waits for an outcome, a time, a consumer or a decision."""
    if life["transaction"]["state"] in ("PREPARED", "PARKED") or "due_at" in life:
        return True
    last = {event["group"]: event["kind"] for event in life["timeline"] if "group" in event}
    return "dead_letter" in last.values() or any(group["state"] != "settled" for group in life["groups"])


def _is_crowded(times: Sequence[float], length: float) -> bool:
    gaps = [after - before for before, after in zip(times, times[1:], strict=False) if after > before]
    return sum(gap < CROWDED_SHARE * length for gap in gaps) * 2 > len(gaps)


def _places(scale: str, length: float) -> Callable[[float], float]:
    """A function that makes a share of the scale, in percent, of the seconds since its begin."""
    if scale == LINEAR:
        return lambda seconds: min(100.0, max(0.0, 100 * seconds / length))
    whole = math.log1p(length / LEAST_SECONDS)
    return lambda seconds: min(100.0, 100 * math.log1p(max(0.0, seconds) / LEAST_SECONDS) / whole)


def _ticks(scale: str, length: float) -> list[float]:
    if scale == LINEAR:
        step = next((step for step in _STEPS if length / step <= MOST_TICKS), length)
        return [number * step for number in range(int(length / step) + 1)]
    return [0.0, *(seconds for seconds in _DECADES if seconds < length)]


class _Drawing:
    """Makes lanes. `place`: the share of the scale of a time, in percent; `end`: the time at which the scale ends."""

    def __init__(self, place: Callable[[float], float], end: float) -> None:
        self._place = place
        self._end = end

    def lanes(
        self, life: Mapping[str, Any], groups: Sequence[str], events: Sequence[tuple[float, dict[str, Any]]]
    ) -> Iterator[Lane]:
        yield self._transaction(life, [(at, event) for at, event in events if "group" not in event])
        states = {row["group"]: row["state"] for row in life["groups"]}
        queued = next((at for at, event in events if event["kind"] == "queued"), None)
        for name in groups:
            own = [(at, event) for at, event in events if event.get("group") == name]
            yield self._group(name, own, own[0][0] if queued is None else queued, states.get(name, "settled"))

    def _transaction(self, life: Mapping[str, Any], events: Sequence[tuple[float, dict[str, Any]]]) -> Lane:
        lane = Lane("transaction")
        by_kind = {event["kind"]: at for at, event in reversed(events)}
        stored = by_kind.get("stored", events[0][0])
        decided, queued = by_kind.get("outcome"), by_kind.get("queued")
        self._bar(lane, "doubt", stored, self._end if decided is None else decided, "without an outcome")
        if decided is not None and queued is None and "due_at" in life:
            queued = self._end
        if decided is not None and queued is not None:
            self._bar(lane, "wait", decided, queued, "on the way into its queue")
        for at, event in events:
            lane.marks.append(Mark("plain", self._left(at), event["event"]))
        return lane

    def _group(self, name: str, events: Sequence[tuple[float, dict[str, Any]]], since: float, state: str) -> Lane:
        lane, is_held, is_over, is_dead = Lane(name), False, False, False
        for at, event in events:
            kind = event["kind"]
            if is_dead:
                self._bar(lane, "dead", since, at, "dead letter")
            elif is_held:
                self._bar(lane, "failed" if kind in _BAD else "work", since, at, f"with its consumer, {event['event']}")
            else:
                self._bar(lane, "wait", since, at, "waits")
            since, is_held, is_dead, is_over = at, kind == "handed_out", kind == "dead_letter", kind in _ENDS
            if not is_held:
                mark = "good" if kind in _GOOD else "bad" if kind in _BAD else "plain"
                lane.marks.append(Mark(mark, self._left(at), event["event"]))
        if is_dead:
            self._bar(lane, "dead", since, self._end, "dead letter")
        elif not is_over and state != "settled":
            self._bar(lane, "work" if is_held else "wait", since, self._end, state)
        return lane

    def _bar(self, lane: Lane, kind: str, since: float, until: float, words: str) -> None:
        if until > since:
            left = self._left(since)
            took = f"{words}: {latency(until - since)}"
            lane.bars.append(Bar(kind, left, round(self._left(until) - left, 2), took))

    def _left(self, at: float) -> float:
        return round(self._place(at), 2)
