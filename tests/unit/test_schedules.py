"""One schedule: which instants are due by each policy, its messages, and which server sends them."""

from __future__ import annotations

from typing import Any

import pytest

from notify.errors import Unavailable, WrongRole
from notify.protocol import ids
from notify.protocol.keys import shard_of_key
from notify.protocol.wire import Payload
from notify.protocol.workers import worker_names
from notify.server.schedules.place import Place
from notify.server.schedules.schedule import MISSED_US, Declaration, Schedule, encoded
from notify.server.settings import Settings
from notify.storage.members import Member

MINUTE = 60_000_000
NOON = 1_800_000_000_000_000 // MINUTE * MINUTE


def schedule(catch_up: str = "last", most: int = 100, every: float = 60.0, **fields: Any) -> Schedule:
    declaration = Declaration(Payload("t", b"x", key=fields.pop("key", None)), None, every, "UTC", catch_up, most)
    row = dict.fromkeys(("paused", "sent", "missed", "last_instant_us", "last_sent_us", "changed_us"), 0)
    values: dict[str, Any] = {"name": "s", "secret": "0" * 32, "place": "", "who": "", "done_us": NOON}
    return Schedule.of(row | values | {"declaration": encoded(declaration)} | fields)


@pytest.mark.parametrize(
    ("catch_up", "most", "late", "sent", "missed"),
    [
        ("last", 100, 30, 1, 0),  # half a minute late: in time by every policy
        ("skip", 100, 30, 1, 0),
        ("last", 100, 90, 1, 1),  # two minutes: the second instant is in time
        ("skip", 100, 90, 1, 1),
        ("all", 100, 90, 2, 0),
        ("all", 3, 601, 4, 7),  # the last three missed ones, and the one in time
        ("all", 1000, 601, 11, 0),
    ],
)
def test_instants_that_are_due(catch_up: str, most: int, late: int, sent: int, missed: int) -> None:
    due = schedule(catch_up, most).due(NOON + MINUTE + late * 1_000_000)
    assert (len(due.instants), due.missed) == (sent, missed)
    assert due.until_us == due.instants[-1] == NOON + MINUTE * (1 + late // 60)
    assert due.instants == sorted(due.instants)


def test_a_long_pause_between_instants() -> None:
    """An hourly schedule that is found two and a half hours late."""
    now_us = 1_800_000_000_000_000 // (60 * MINUTE) * (60 * MINUTE) + 150 * MINUTE
    for catch_up, expected in (("last", 1), ("skip", 0), ("all", 2)):
        due = schedule(catch_up, every=3600.0, done_us=now_us - 150 * MINUTE).due(now_us)
        assert (len(due.instants), due.missed) == (expected, 2 - expected)
        assert due.until_us == now_us - 30 * MINUTE


def test_years_of_instants_are_bounded() -> None:
    due = schedule("all", 1000, every=1.0, done_us=NOON - 10 * 365 * 86_400_000_000).due(NOON)
    assert len(due.instants) == 1000 and due.instants[-1] == NOON


def test_between_two_instants_nothing_is_due() -> None:
    due = schedule().due(NOON + 1)
    assert due == (NOON, [], 0, NOON)


def test_the_message_of_an_instant_is_always_the_same() -> None:
    a, b = schedule(), schedule()
    assert a.message(NOON) == b.message(NOON) != a.message(NOON + MINUTE)
    message = a.message(NOON)
    assert message.headers == {"notify-schedule": "s", "notify-scheduled-for": "2027-01-15T08:00:00.000000Z"}
    transaction, number = ids.parse_message_id(message.id or "")
    assert number == 0 and ids.milliseconds(transaction) == NOON // 1000
    assert schedule(secret="1" * 32).message(NOON).id != message.id


def test_a_schedule_is_waiting_late_paused_or_broken() -> None:
    assert schedule().state(NOON) == "waiting"
    assert schedule().state(NOON + MINUTE + MISSED_US + 1) == "late"
    assert schedule(paused=1).state(NOON + 10 * MINUTE) == "paused"
    assert schedule(declaration="{").state(NOON) == "broken"
    strange = encoded(Declaration(Payload("t", b"x"), "0 7 * * *", None, "Europe/Atlantis"))
    broken = schedule(declaration=strange)
    assert broken.state(NOON) == "broken" and "no time zone" in broken.fault and broken.next_us == 0


# --- who sends --------------------------------------------------------------------------------------------------


def member(name: str, shard: str = "main", url: str = "") -> Member:
    return Member(name, "server", url or f"http://{name}", ("transactions", "queue"), (shard,))


def test_one_worker_sends_a_schedule() -> None:
    names = worker_names(3)
    places = [Place(Settings(workers=3, shard=name)) for name in names]
    for s in (schedule(), schedule(key="k"), schedule(name="other")):
        key = s.declaration.message.key or s.name
        assert [place.has(s) for place in places] == [name == shard_of_key(key, names) for name in names]


def test_servers_over_one_storage_take_turns_and_step_in() -> None:
    members = [member(f"s{n}") for n in range(3)]
    places = [Place(Settings(), lambda: members, me, shares_storage=True) for me in members]
    firsts = set()
    for n in range(50):
        s = schedule(name=f"schedule-{n}")
        assert all(place.has(s) for place in places)
        first = [place.comes_first(s) for place in places]
        assert sum(first) == 1
        firsts.add(first.index(True))
        members_before, members[:] = list(members), [m for m in members if m is not members[first.index(True)]]
        assert sum(place.comes_first(s) for place in places) == 1
        members[:] = members_before
    assert firsts == {0, 1, 2}


def test_a_log_in_a_registry_sends_what_was_declared_there() -> None:
    here, there = member("a", "east"), member("b", "west")
    east = Place(Settings(shard="east"), lambda: [here, there], here)
    west = Place(Settings(shard="west"), lambda: [here, there], there)
    s = schedule(place=east.of_new)
    assert east.of_new == "east" and east.has(s) and not west.has(s)
    east.check_declares()
    shared = Place(Settings(), lambda: [here], here, shares_storage=True)
    assert not shared.has(s) and not east.has(schedule(place=shared.of_new))


def test_a_log_that_no_server_has_is_away() -> None:
    here, there = member("a", "east"), member("b", "west")
    members: list[Member] = []
    east = Place(Settings(shard="east"), lambda: members, here)
    its, own, shared = schedule(place="west"), schedule(place="east"), schedule(place="")
    assert not east.is_away(its), "the registry is not read yet"
    members[:] = [here, there]
    assert not east.is_away(its)
    members[:] = [here]
    assert [east.is_away(s) for s in (its, own, shared)] == [True, False, False]
    assert not Place(Settings(shard="east")).is_away(its)
    over = Place(Settings(), lambda: [here], here, shares_storage=True)
    assert not over.is_away(shared) and not over.is_away(own)


def test_two_logs_of_one_name_take_no_schedules() -> None:
    here, twin, before = member("a"), member("b"), member("a-before", url="http://a")
    with pytest.raises(Unavailable, match="its own --shard"):
        Place(Settings(), lambda: [here, twin], here).check_declares()
    Place(Settings(), lambda: [here, before], here).check_declares()  # its own earlier process


def test_servers_that_store_no_messages_take_no_schedules() -> None:
    with pytest.raises(WrongRole, match="queue role"):
        Place(Settings(roles="queue")).check_declares()
    with pytest.raises(WrongRole, match="bridge or relay"):
        Place(Settings(kafka="kafka://127.0.0.1:9092")).check_declares()
