"""The drawing of a message's story is to scale, and shows what is open until now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from notify.server.console.story import CROWDED_SHARE, LEAST_APART, MOST_LANES, Lane, drawn, trace_id

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def instant(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def event(at: float, kind: str, group: str = "") -> dict[str, Any]:
    return {"at": instant(at), "kind": kind, "event": kind} | ({"group": group} if group else {})


def life(*events: dict[str, Any], now: float, state: str = "COMMITTED", **groups: str) -> dict[str, Any]:
    """An answer of the admin route; `groups`: the state in each."""
    return {
        "at": instant(now),
        "transaction": {"state": state},
        "timeline": list(events),
        "groups": [{"group": name, "state": stands} for name, stands in groups.items()],
    }


START = (event(0, "stored"), event(2, "outcome"), event(2, "queued"))


def bars(lane: Lane) -> list[tuple[str, float, float]]:
    return [(bar.kind, bar.left, bar.width) for bar in lane.bars]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    story = drawn(
        life(
            *START,
            event(4, "handed_out", "g"),
            event(5, "failed", "g"),
            event(8, "handed_out", "g"),
            event(10, "acknowledged", "g"),
            now=99,
            g="settled",
        )
    )
    assert story is not None and (story.scale, story.seconds) == ("linear", 10)
    transaction, group = story.lanes
    assert bars(transaction) == [("doubt", 0, 20)]
    assert bars(group) == [("wait", 20, 20), ("failed", 40, 10), ("wait", 50, 30), ("work", 80, 20)]
    assert [(mark.kind, mark.left) for mark in group.marks] == [("bad", 50), ("good", 100)]
    assert group.bars[1].words == "with its consumer, failed: 1 s"
    assert story.ticks == [(0, "0 ms"), (20, "2 s"), (40, "4 s"), (60, "6 s"), (80, "8 s"), (100, "10 s")]


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (life(event(0, "stored"), now=10, state="PREPARED"), "doubt"),
        (life(*START, now=10, g="waiting"), "wait"),
        (life(*START, event(4, "handed_out", "g"), now=10, g="handed out"), "work"),
        (life(*START, event(4, "dead_letter", "g"), now=10, g="settled"), "dead"),
        (life(*START[:2], now=10) | {"due_at": instant(60)}, "wait"),
    ],
)
def test_an_open_event_reaches_until_now(told: dict[str, Any], kind: str) -> None:
    story = drawn(told)
    assert story is not None and story.seconds == 10
    last = story.lanes[-1].bars[-1]
    assert last.kind == kind and last.left + last.width == pytest.approx(100)


def test_a_dead_letter_that_was_sent_again_is_over() -> None:
    story = drawn(life(*START, event(4, "dead_letter", "g"), event(8, "redriven", "g"), now=99, g="settled"))
    assert story is not None and story.seconds == 8
    assert bars(story.lanes[1])[-1] == ("dead", 50, 50)


def test_milliseconds_before_hours_are_on_a_logarithmic_scale() -> None:
    """On a linear one the first events would be one."""
    moments = (0, 0.01, 0.02, 0.03, 0.05)
    events = [event(at, kind) for at, kind in zip(moments, ("stored", "outcome", "queued"), strict=False)]
    told = life(*events, event(0.05, "handed_out", "g"), event(3600, "acknowledged", "g"), now=9999, g="settled")
    story = drawn(told)
    assert story is not None and (story.scale, story.other_scale) == ("logarithmic", "linear")
    lefts = [mark.left for mark in story.lanes[0].marks]
    assert all(after - before > 100 * CROWDED_SHARE for before, after in zip(lefts, lefts[1:], strict=False))
    places = [left for left, _ in story.ticks]
    assert len(places) > 2
    assert all(after - before >= LEAST_APART for before, after in zip(places, places[1:], strict=False))
    other = drawn(told, "linear")
    assert other is not None and other.scale == "linear" and other.lanes[0].marks[1].left < 0.01


def test_a_story_of_one_instant_has_no_drawing() -> None:
    assert drawn(life(event(0, "stored"), event(0, "outcome"), event(0, "queued"), now=9)) is None
    assert drawn(life(now=9)) is None


def test_lanes_have_a_bound() -> None:
    waiting = {f"g{n}": "waiting" for n in range(MOST_LANES + 10)}
    story = drawn(life(*START, now=9, **waiting))
    assert story is not None and len(story.lanes) == MOST_LANES + 1 and story.left_out == 10


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"00-{'a1' * 16}-{'b2' * 8}-01", "a1" * 16), (f"00-{'A1' * 16}-{'b2' * 8}-01", ""), ("", ""),
        (f"00-{'a1' * 16}-{'b2' * 8}-01 ", ""),
    ],
)  # fmt: skip
def test_a_trace_has_an_id(text: str, name: str) -> None:
    assert trace_id({"traceparent": text}) == name and trace_id(None) == ""
