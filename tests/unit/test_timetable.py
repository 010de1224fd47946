"""The instants of schedules: time zones with their gaps and repeated hours, intervals, and what is refused."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notify.errors import InvalidRequest
from notify.server.schedules import timetable
from notify.server.schedules.timetable import Timetable

HOUR = 3_600_000_000
MINUTE = HOUR // 60


def us(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000)


def shown(instants: list[int]) -> list[str]:
    return [datetime.fromtimestamp(at / 1e6, UTC).strftime("%m-%d %H:%M") for at in instants]


def after(cron: str, zone: str, since: str, count: int) -> list[str]:
    return shown(Timetable(cron, None, zone).next(us(since), count))


@pytest.mark.parametrize(
    ("zone", "cron", "since", "expected"),
    [
        # Berlin's clocks go from 02:00 to 03:00 on 29 March 2026, at 01:00 UTC; Adelaide's on 4 October, at 16:30 UTC.
        ("Europe/Berlin", "30 2 * * *", "2026-03-28T00:00Z", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        ("Australia/Adelaide", "30 2 * * *", "2026-10-02T12:00Z", ["10-02 17:00", "10-03 16:30", "10-04 16:00"]),
        # Several times in the gap are one instant.
        ("Europe/Berlin", "0,20,40 2 * * *", "2026-03-28T02:00Z", ["03-29 01:00", "03-30 00:00", "03-30 00:20"]),
        # Lord Howe's gap has half an hour.
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-02T12:00Z", ["10-02 15:45", "10-03 15:30", "10-04 15:15"]),
        # A gap at midnight: Cairo's clocks go from 00:00 to 01:00 on 24 April 2026.
        ("Africa/Cairo", "0 0 * * *", "2026-04-22T12:00Z", ["04-22 22:00", "04-23 22:00", "04-24 21:00"]),
        # By the hours that pass, the gap has no instants.
        ("Europe/Berlin", "30 * * * *", "2026-03-29T00:00Z", ["03-29 00:30", "03-29 01:30", "03-29 02:30"]),
    ],
)
def test_a_time_that_the_clocks_skip_is_due_at_the_end_of_the_gap(
    zone: str, cron: str, since: str, expected: list[str]
) -> None:
    assert after(cron, zone, since, 3) == expected


@pytest.mark.parametrize(
    ("zone", "cron", "since", "expected"),
    [
        # Berlin has 02:00 to 03:00 twice on 25 October 2026; Sydney on 5 April.
        ("Europe/Berlin", "30 2 * * *", "2026-10-24T12:00Z", ["10-25 00:30", "10-26 01:30", "10-27 01:30"]),
        ("Australia/Sydney", "30 2 * * *", "2026-04-04T00:00Z", ["04-04 15:30", "04-05 16:30", "04-06 16:30"]),
        ("America/Santiago", "30 23 * * *", "2026-04-04T12:00Z", ["04-05 02:30", "04-06 03:30", "04-07 03:30"]),
        # By the hours that pass, it is due in both passes.
        ("Europe/Berlin", "30 * * * *", "2026-10-25T00:00Z", ["10-25 00:30", "10-25 01:30", "10-25 02:30"]),
        ("Australia/Sydney", "*/30 2 * * *", "2026-04-04T14:59Z", ["04-04 15:00", "04-04 15:30", "04-04 16:00"]),
    ],
)
def test_a_time_that_comes_twice_is_due_the_first_time(zone: str, cron: str, since: str, expected: list[str]) -> None:
    assert after(cron, zone, since, 3) == expected


def test_an_instant_in_the_second_pass_is_never_followed_by_one_in_the_first() -> None:
    """Who starts at 02:10 of the second pass must not get 02:30 of the first one, which was 40 minutes ago."""
    assert after("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10Z", 1) == ["10-26 01:30"]


def test_a_cron_expression_counts_days_weekdays_and_the_last_of_a_month() -> None:
    assert after("0 7 * * 1-5", "Europe/Berlin", "2026-11-27T12:00Z", 2) == ["11-30 06:00", "12-01 06:00"]
    assert after("0 0 L * *", "UTC", "2026-02-01T00:00Z", 2) == ["02-28 00:00", "03-31 00:00"]
    assert after("0 12 * * FRI#2", "UTC", "2026-11-01T00:00Z", 1) == ["11-13 12:00"]
    assert after("0 0 29 2 *", "UTC", "2026-01-01T00:00Z", 1) == ["02-29 00:00"]  # of 2028


def oracle(cron: str, zone: str, since: int, until: int) -> list[int]:
    """The instants of `M H * * *`, minute by minute: each local time once, at its first pass or the end of its gap; of
    `*/N` and `M *` at every minute that shows such a time."""
    minute, hour, *_ = cron.split()
    tz = ZoneInfo(zone)
    by_hours = minute.startswith("*") or hour.startswith("*")
    minutes = set(range(0, 60, int(minute[2:]))) if minute.startswith("*/") else {int(m) for m in minute.split(",")}
    hours = set(range(24)) if hour == "*" else {int(h) for h in hour.split(",")}
    found, seen = [], set()
    start = since // MINUTE * MINUTE - 48 * HOUR
    before = datetime.fromtimestamp((start - MINUTE) / 1e6, tz).replace(tzinfo=None)
    for at in range(start, until + 1, MINUTE):
        local = datetime.fromtimestamp(at / 1e6, tz).replace(tzinfo=None)
        passed = (
            [local]
            if by_hours
            else [local - timedelta(minutes=n) for n in range((local - before) // timedelta(minutes=1))]
        )
        if any(t.minute in minutes and t.hour in hours and (by_hours or t not in seen) for t in passed):
            found.append(at)
        seen.update(passed)
        before = local
    return [at for at in found if since < at <= until]


CHANGES = {
    "Europe/Berlin": ("2026-03-29T01:00Z", "2026-10-25T01:00Z"),
    "America/New_York": ("2026-03-08T07:00Z", "2026-11-01T06:00Z"),
    "America/Santiago": ("2026-09-06T04:00Z", "2026-04-05T03:00Z"),
    "Australia/Sydney": ("2026-10-03T16:00Z", "2026-04-04T16:00Z"),
    "Australia/Lord_Howe": ("2026-10-03T15:30Z", "2026-04-04T15:00Z"),
    "Pacific/Auckland": ("2026-09-26T14:00Z", "2026-04-04T14:00Z"),
    "Africa/Cairo": ("2026-04-23T22:00Z", "2026-10-29T21:00Z"),
    "Asia/Kolkata": ("2026-03-29T01:00Z",),
}


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(zone, at) for zone, instants in CHANGES.items() for at in instants]),
    st.integers(-4 * 60, 4 * 60),
    st.sampled_from(["{m} {h} * * *", "{m},{n} {h},{g} * * *", "*/{s} {h} * * *", "{m} * * * *", "*/{s} * * * *"]),
    st.tuples(
        st.integers(0, 59), st.integers(0, 59), st.integers(0, 4), st.integers(0, 4), st.sampled_from([5, 15, 20])
    ),
)
def test_it_agrees_with_a_count_of_the_minutes(
    change: tuple[str, str], offset: int, form: str, numbers: tuple[int, int, int, int, int]
) -> None:
    zone, at = change
    m, n, h, g, s = numbers
    cron = form.format(m=m, n=n, h=h, g=g, s=s)
    since, until = us(at) + offset * MINUTE, us(at) + 26 * HOUR
    table = Timetable(cron, None, zone)
    expected = oracle(cron, zone, since, until)
    assert list(takewhile(lambda each: each <= until, table.after(since))) == expected
    assert table.latest(since, until, 7) == expected[-7:]


@pytest.mark.parametrize(
    ("cron", "since", "expected"),
    [
        ("*/20 0 * * *", "2026-10-03T15:30Z", ["10-04 13:00", "10-04 13:20", "10-04 13:40"]),
        ("30 * * * *", "2026-10-03T14:45Z", ["10-03 15:00", "10-03 15:30", "10-03 16:30"]),
        ("30 * * * *", "2026-04-04T14:00Z", ["04-04 14:30", "04-04 15:00", "04-04 16:00"]),
    ],
)
def test_clocks_that_change_by_half_an_hour(cron: str, since: str, expected: list[str]) -> None:
    assert shown(Timetable(cron, None, "Australia/Lord_Howe").next(us(since), 3)) == expected


def test_the_latest_of_many() -> None:
    since, until = us("2020-01-01T00:00Z"), us("2026-11-29T12:00:30Z")
    assert shown(Timetable("* * * * *", None, "UTC").latest(since, until, 3)) == [
        "11-29 11:58",
        "11-29 11:59",
        "11-29 12:00",
    ]
    assert shown(Timetable("0 0 1 1 *", None, "UTC").latest(since, until, 100))[-1] == "01-01 00:00"
    assert len(Timetable("0 0 1 1 *", None, "UTC").latest(since, until, 100)) == 6
    assert Timetable("0 0 1 1 *", None, "UTC").latest(until, until, 5) == []


def test_intervals_are_counted_from_1970() -> None:
    table = Timetable(None, 90 * 60, "Europe/Berlin")
    assert shown(table.next(us("2026-11-29T00:00Z"), 3)) == ["11-29 01:30", "11-29 03:00", "11-29 04:30"]
    assert shown(table.latest(us("2026-11-29T00:00Z"), us("2026-11-29T04:40Z"), 2)) == ["11-29 03:00", "11-29 04:30"]
    assert table.latest(us("2026-11-29T00:00Z"), us("2026-11-29T01:00Z"), 2) == []


@pytest.mark.parametrize(
    ("cron", "every", "zone", "said"),
    [
        ("*/90 * * * *", None, "UTC", "a step of this field is 60 at most, not 90"),
        ("0 0/36,1 * * *", None, "UTC", "a step of this field is 24 at most, not 36"),
        (None, None, "UTC", "exactly one"),
        ("* * * * *", 5.0, "UTC", "exactly one"),
        ("* * * *", None, "UTC", "five fields"),
        ("0 0 * * * *", None, "UTC", "five fields"),
        ("@daily", None, "UTC", "five fields"),
        ("61 * * * *", None, "UTC", "Bad minute"),
        ("0 25 * * *", None, "UTC", "Bad hour"),
        ("0 0 31 2 *", None, "UTC", "Bad day-of-month"),
        ("* " * 200, None, "UTC", "five fields"),
        ("0 0 * * ٣", None, "UTC", "five fields"),
        (None, 0.5, "UTC", "every"),
        (None, float("nan"), "UTC", "every"),
        (None, 1e9, "UTC", "every"),
        ("* * * * *", None, "Europe/Atlantis", "no time zone"),
        ("* * * * *", None, "../../etc/passwd", "no time zone"),
        ("* * * * *", None, "localtime", "no time zone"),
        ("* * * * *", None, "right/Europe/Berlin", "no time zone"),
        ("* * * * *", None, "", "no time zone"),
    ],
)
def test_a_wrong_expression_interval_or_zone_is_refused(
    cron: str | None, every: float | None, zone: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Timetable(cron, every, zone)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789*/,-#LWMONfeb ", max_size=24))
def test_any_text_is_an_expression_or_is_refused(text: str) -> None:
    try:
        table = Timetable(text, None, "Europe/Berlin")
    except InvalidRequest:
        return
    found = table.next(us("2026-03-28T12:00Z"), 3)
    assert found == sorted(set(found))


@pytest.mark.long
def test_a_machine_without_the_database_of_zones_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ZoneInfo:
        raise zoneinfo.ZoneInfoNotFoundError(name)

    monkeypatch.setattr(timetable, "ZoneInfo", missing)
    with pytest.raises(InvalidRequest, match="pip install tzdata"):
        Timetable("0 7 * * *", None, "Europe/Berlin")
