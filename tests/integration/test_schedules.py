"""Schedules: declared in code, over HTTP and by command; each instant once, over kills, with several servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa

from notify.client import AsyncTransactionProducer, Message, TransactionProducer
from notify.errors import InvalidRequest
from notify.protocol.keys import shard_of_key
from notify.protocol.workers import worker_names
from notify.server.database import open_database
from notify.server.schedules.place import Place
from notify.server.schedules.records import ScheduleRecords
from notify.server.schedules.schedule import Mark, Schedule
from notify.server.schedules.schedules import Schedules
from notify.server.settings import Settings
from notify.storage.members import Member
from notify.storage.sql.administration import server_schedule
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import Command, cli
from tests.support.databases import empty_database
from tests.support.groups import drain, subscribe
from tests.support.http import admin, ask, call, metric, post, refusal
from tests.support.schedules import each_second, stored
from tests.support.servers import Started, make_storage, stop_if_running, until_known

DAY = 86_400


@pytest.fixture
def frozen() -> Iterator[InMemoryServer]:
    """A server whose clock stands at an instant that a test can reckon with."""
    with InMemoryServer() as server:
        server.freeze()
        server._frozen_us = round(datetime(2030, 1, 1, 12, tzinfo=UTC).timestamp() * 1e6)
        yield server


def declare(url: str, name: str, topic: str, body: str = "x", **when: Any) -> dict[str, Any]:
    answer: dict[str, Any] = call(
        url, "PUT", f"/v1/schedules/{name}", {"message": {"topic": topic, "body": body}} | when
    )
    return answer


def one(url: str, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = admin(url, "GET", f"schedules/{name}")
    return answer


def instants(server: InMemoryServer, topic: str) -> list[str]:
    """The instants that the messages of a topic are for, as hours and minutes."""
    status, _ = ask(server.url, "GET", f"/v1/topics/{topic}")
    rows = [] if status == 404 else _all(server.url, topic)
    return [row["headers"]["notify-scheduled-for"][5:16] for row in rows]


# --- declarations -------------------------------------------------------------------------------------------------


def test_declared_in_code_once(frozen: InMemoryServer, unique: str) -> None:
    message = Message(unique, {"report": "daily"}, key=7, tag="vip", headers={"h": "v"}, ttl=60)
    with TransactionProducer(frozen.url, group="shop") as producer:
        coming = producer.schedule(unique, message, cron="0 7 * * *", zone=ZoneInfo("Europe/Berlin"))
        assert coming[0] == datetime(2030, 1, 2, 6, tzinfo=UTC)
        assert producer.schedule(unique, message, cron="0 7 * * *", zone="Europe/Berlin") == coming
        frozen.advance(18 * 3600)
        (stored,) = frozen.messages(unique)
        assert (stored.json(), stored.key, stored.tag) == ({"report": "daily"}, "7", "vip")
        (row,) = admin(frozen.url, "GET", f"messages?topic={unique}")["messages"]
        assert row["headers"] == {
            "content-type": "application/json", "h": "v", "notify-schedule": unique,
            "notify-scheduled-for": "2030-01-02T06:00:00.000000Z",
        }  # fmt: skip
        life = admin(frozen.url, "GET", f"messages/{row['id']}")
        assert life["timeline"][0]["event"] == f"sent by schedule {unique} for 2030-01-02T06:00:00.000000Z"
        assert producer.unschedule(unique) is True
        assert producer.unschedule(unique) is False
    frozen.advance(DAY)
    assert len(frozen.messages(unique)) == 1
    actions = admin(frozen.url, "GET", f"actions?target={unique}")["actions"]
    assert [(row["what"], row["reason"]) for row in actions] == [
        ("schedule.delete", "declared in code"), ("schedule.put", "declared in code"),
    ]  # fmt: skip


def test_an_async_producer_declares_and_ends_a_schedule(notify_server: InMemoryServer, unique: str) -> None:
    async def use() -> None:
        async with AsyncTransactionProducer(notify_server.url, group="shop") as producer:
            coming = await producer.schedule(unique, Message(unique, b"\xff"), every=timedelta(seconds=1))
            assert [later - earlier for earlier, later in zip(coming, coming[1:], strict=False)] == [
                timedelta(seconds=1)
            ] * 2
            await asyncio.to_thread(notify_server.wait_for, unique, 2)
            assert await producer.unschedule(unique)

    asyncio.run(use())
    assert {m.body for m in notify_server.messages(unique)} == {b"\xff"}


def test_all_instances_of_a_service_declare_it_at_once(frozen: InMemoryServer, unique: str) -> None:
    """As the workers of a web server that starts: some of them got a Conflict, and ended."""

    async def declare_at_once(*crons: str) -> None:
        async with AsyncTransactionProducer(frozen.url, group="shop") as producer:
            message = Message(unique, "x")
            declared = [producer.schedule(unique, message, cron=cron) for cron in crons]
            assert {len(coming) for coming in await asyncio.gather(*declared)} == {3}

    for cron in ("0 7 * * *", "0 8 * * *"):  # it is made, and changed
        asyncio.run(declare_at_once(*[cron] * 4))
        frozen.advance(1)
    actions = admin(frozen.url, "GET", f"actions?target={unique}")["actions"]
    assert [row["what"] for row in actions] == ["schedule.put"] * 2
    asyncio.run(declare_at_once("0 9 * * *", "0 10 * * *"))  # two versions of the service
    assert admin(frozen.url, "GET", f"schedules/{unique}")["cron"] in ("0 9 * * *", "0 10 * * *")


def test_a_wrong_declaration_is_refused_in_the_call(notify_server: InMemoryServer) -> None:
    with TransactionProducer(notify_server.url, group="shop") as producer:
        for said, message, when in (
            ("exactly one", Message("t", "x"), {}),
            ("exactly one", Message("t", "x"), {"cron": "* * * * *", "every": 5}),
            ("no delay", Message("t", "x", delay=5), {"every": 5}),
            ("five fields", Message("t", "x"), {"cron": "@daily"}),
            ("no time zone", Message("t", "x"), {"cron": "0 7 * * *", "zone": "Berlin"}),
            ("skip, last", Message("t", "x"), {"every": 5, "catch_up": "some"}),
            ("catch_up_most", Message("t", "x"), {"every": 5, "catch_up_most": 0}),
            ("65536 bytes", Message("t", b"x" * 70_000), {"every": 5}),
            ("65536 in a schedule's", Message("t", bytes(2 << 20)), {"every": 5}),
        ):
            with pytest.raises(InvalidRequest, match=said):
                producer.schedule("s", message, **when)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="name"):
            producer.schedule("a/b", Message("t", "x"), every=5)
    status, problem = ask(
        notify_server.url, "PUT", "/v1/schedules/s", {"message": {"topic": "t", "body": "x"}, "at": 5}
    )
    assert (status, problem["code"]) == (422, "invalid_schema")
    stored = {"topic": "t", "body": "{}", "headers": {"notify-body": "stored"}}
    status, problem = ask(notify_server.url, "PUT", "/v1/schedules/s", {"message": stored, "every": 5})
    assert (status, problem["code"]) == (422, "invalid_schedule") and "sweep" in problem["detail"]
    many = {str(n): "" for n in range(31)}
    body = {"message": {"topic": "t", "body": "x", "headers": many}, "every": 5}
    assert ask(notify_server.url, "PUT", "/v1/schedules/s", body)[0] == 413  # with the two of the schedule it is 33
    assert admin(notify_server.url, "GET", "schedules")["schedules"] == []


def test_servers_without_a_registry_take_no_schedule_through_a_list_of_them(notify_server: InMemoryServer) -> None:
    with InMemoryServer() as other, TransactionProducer(f"{notify_server.url},{other.url}", group="shop") as producer:
        with pytest.raises(InvalidRequest, match="no registry connects"):
            producer.schedule("s", Message("t", "x"), every=5)


def test_no_topic_is_made_ahead(unique: str) -> None:
    with InMemoryServer(create_topics=False) as server:
        assert (
            ask(server.url, "PUT", f"/v1/schedules/{unique}", {"message": {"topic": unique, "body": "x"}, "every": 5})[
                0
            ]
            == 404
        )
        admin(server.url, "PUT", f"topics/{unique}", {})
        assert declare(server.url, unique, unique, every=1)["changed"]
        server.wait_for(unique, 1)


# --- when they are due --------------------------------------------------------------------------------------------


def test_instants_over_a_change_of_the_clocks(frozen: InMemoryServer, unique: str) -> None:
    """Zurich's clocks go back on 27 October 2030, and have 02:30 twice; Auckland's go forward on 29 September."""
    frozen._frozen_us = round(datetime(2030, 9, 28, 12, tzinfo=UTC).timestamp() * 1e6)
    declare(frozen.url, unique, unique, cron="30 2 * * *", zone="Pacific/Auckland")
    for _ in range(2 * 24 * 4):
        frozen.advance(900)
    assert instants(frozen, unique) == ["09-28T14:00", "09-29T13:30"]  # 03:00 and 02:30 of New Zealand
    declare(frozen.url, unique, unique, cron="30 2 * * *", zone="Europe/Zurich")
    frozen.advance((datetime(2030, 10, 26, 12, tzinfo=UTC) - frozen.now).total_seconds())
    for _ in range(2 * 24 * 4):
        frozen.advance(900)
    assert instants(frozen, unique)[-2:] == ["10-27T00:30", "10-28T01:30"]


@pytest.mark.parametrize(
    ("policy", "expected", "missed"),
    [
        ({"catch_up": "last"}, ["01-01T17:00"], 4),
        ({"catch_up": "skip"}, [], 5),
        ({"catch_up": "all"}, ["01-01T13:00", "01-01T14:00", "01-01T15:00", "01-01T16:00", "01-01T17:00"], 0),
        ({"catch_up": "all", "catch_up_most": 2}, ["01-01T16:00", "01-01T17:00"], 3),
    ],
)
def test_a_server_that_was_away_for_hours(
    frozen: InMemoryServer, unique: str, policy: dict[str, Any], expected: list[str], missed: int
) -> None:
    declare(frozen.url, unique, unique, cron="0 * * * *", **policy)
    frozen.advance(5.5 * 3600)
    assert instants(frozen, unique) == expected
    row = one(frozen.url, unique)
    assert (row["sent"], row["missed"], row["next"][0]) == (len(expected), missed, "2030-01-01T18:00:00.000000Z")
    assert metric(frozen.url, "notify_schedule_missed_total") == missed
    if missed:
        frozen.inside(lambda running: running.alarms.look())
        (alarm,) = [a for a in admin(frozen.url, "GET", "alarms")["alarms"] if a["name"] == "schedule"]
        assert alarm["target"] == unique and "left out" in alarm["text"]
    frozen.advance(1800)
    assert instants(frozen, unique) == [*expected, "01-01T18:00"]


def test_a_clock_that_jumps(frozen: InMemoryServer, unique: str) -> None:
    """Ahead by a day and back: what was sent is not sent again; a pause and resume continues from now."""
    declare(frozen.url, unique, unique, cron="0 * * * *")
    frozen.advance(DAY)
    assert instants(frozen, unique) == ["01-02T12:00"]
    frozen._offset_us = 0
    for _ in range(3):
        frozen.advance(3600)
    assert instants(frozen, unique) == ["01-02T12:00"]
    frozen.inside(lambda running: running.alarms.look())
    assert "a clock was ahead" in admin(frozen.url, "GET", "alarms")["alarms"][0]["text"]
    for what in ("pause", "resume"):
        admin(frozen.url, "POST", f"schedules/{unique}/{what}", {})
    frozen.advance(3600)
    assert instants(frozen, unique)[-1] == "01-01T16:00"
    frozen.advance(20 * 3600)
    assert Counter(instants(frozen, unique))["01-02T12:00"] == 1  # its id is known


def test_a_change_while_it_runs(frozen: InMemoryServer, unique: str) -> None:
    """With other instants it begins now, and does not catch up on them; with another message its instants continue."""
    declare(frozen.url, unique, unique, "a", cron="0 7 * * *")
    assert declare(frozen.url, unique, unique, "a", cron="0 7 * * *")["changed"] is False
    assert declare(frozen.url, unique, unique, "a", cron="0 11 * * *")["changed"] is True
    frozen.advance(60)
    assert instants(frozen, unique) == []
    assert declare(frozen.url, unique, unique, "b", cron="0 11 * * *")["changed"] is True
    frozen.advance(23 * 3600)
    assert [(m.text, at) for m, at in zip(frozen.messages(unique), instants(frozen, unique), strict=True)] == [
        ("b", "01-02T11:00")
    ]


def test_two_versions_of_a_service_declare_it_in_turns(frozen: InMemoryServer, unique: str) -> None:
    """As processes of both start during a rolling deploy: each instant is one message, of the version that was last."""
    for turn in range(8):
        body = ("old", "new")[turn % 2]
        assert declare(frozen.url, unique, unique, body, cron="0 * * * *")["changed"] is True
        frozen.advance(1800)
        assert declare(frozen.url, unique, unique, body, cron="0 * * * *")["changed"] is False
    due = [f"01-01T{hour}:00" for hour in (13, 14, 15, 16)]
    assert instants(frozen, unique) == due
    assert [m.text for m in frozen.messages(unique)] == ["new"] * 4
    # Other instants begin at each declaration; what both have in common is still one message.
    for turn in range(8):
        cron = ("0 * * * *", "*/30 * * * *")[turn % 2]
        assert declare(frozen.url, unique, unique, "new", cron=cron)["changed"] is (turn > 0)
        frozen.advance(900)
    assert Counter(instants(frozen, unique)).most_common(1)[0][1] == 1
    assert instants(frozen, unique)[4:] == ["01-01T16:30", "01-01T17:00", "01-01T17:30", "01-01T18:00"]


def test_a_paused_schedule_sends_nothing_until_it_is_resumed(frozen: InMemoryServer, unique: str) -> None:
    declare(frozen.url, unique, unique, cron="0 * * * *", catch_up="all")
    dry = admin(frozen.url, "POST", f"schedules/{unique}/pause", {"dry_run": True})
    assert dry["dry_run"] and one(frozen.url, unique)["state"] == "waiting"
    admin(frozen.url, "POST", f"schedules/{unique}/pause", {})
    frozen.advance(2.5 * 3600)
    row = one(frozen.url, unique)
    assert (row["state"], row["next"], instants(frozen, unique)) == ("paused", [], [])
    answer = admin(frozen.url, "POST", f"schedules/{unique}/resume", {})
    assert answer["result"]["next"][0] == "2030-01-01T15:00:00.000000Z"
    frozen.advance(1800)
    assert instants(frozen, unique) == ["01-01T15:00"]
    assert refusal(frozen.url, "POST", "schedules/none/pause")[0] == 404


@pytest.mark.long
def test_a_thousand_at_midnight(frozen: InMemoryServer, unique: str) -> None:
    async def thousand(schedules: Schedules) -> None:
        declaration = json.dumps({"message": {"topic": unique, "body": "eA=="}, "cron": "0 0 * * *"})
        fields = dict.fromkeys(("paused", "sent", "missed", "last_instant_us", "last_sent_us", "changed_us"), 0)
        same = fields | {"place": "", "declaration": declaration, "done_us": schedules._clock(), "who": ""}
        rows = [same | {"name": f"{unique}-{n}", "secret": f"{n:032}"} for n in range(1000)]
        with schedules._records._engine.begin() as connection:
            connection.execute(server_schedule.insert(), rows)
        await schedules.follow()

    frozen.inside(lambda running: thousand(running.schedules))
    frozen.advance(12 * 3600)
    names = Counter(row["headers"]["notify-schedule"] for row in _all(frozen.url, unique))
    assert len(names) == 1000 and set(names.values()) == {1}


def _all(url: str, topic: str, worker: str = "") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        page = call(url, "GET", f"{worker}/v1/topics/{topic}/queues/0/messages?offset={len(rows)}&max=1000")["messages"]
        rows += page
        if len(page) < 1000:
            return rows


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_message_that_is_refused_is_tried_again(frozen: InMemoryServer, unique: str) -> None:
    """Its topic takes no more; the alarm says why, and the message comes when there is room."""
    admin(frozen.url, "PUT", f"topics/{unique}", {"backlog": 1, "backlog_policy": "refuse"})
    subscribe(frozen.url, unique, unique)
    post(frozen.url, "/v1/messages", {"messages": [{"topic": unique, "body": "full"}]})
    declare(frozen.url, unique, unique, cron="0 * * * *")
    frozen.advance(3600)
    assert "refused" in one(frozen.url, unique)["fault"]
    frozen.advance(90)
    frozen.inside(lambda running: running.alarms.look())
    (alarm,) = [a for a in admin(frozen.url, "GET", "alarms")["alarms"] if a["name"] == "schedule"]
    assert "is late" in alarm["text"] and "refused" in alarm["text"]
    assert metric(frozen.url, f'notify_schedule_next_seconds{{schedule="{unique}"}}') == -90
    drain(frozen.url, unique, unique, 1)
    frozen.advance(10)
    assert len(frozen.messages(unique)) == 2 and one(frozen.url, unique)["fault"] == ""


def test_killed_between_the_message_and_the_mark(tmp_path: Path, unique: str) -> None:
    """The message of the instant is there, and the mark is not: the next server finds its id used."""
    data = tmp_path / "data"
    server = ServerProcess(data, environment={"NOTIFY_CRASH_AT": "schedule.before_mark:2"}).start()
    try:
        declare(server.url, unique, unique, "a", every=1, catch_up="all", catch_up_most=1000)
        assert server.process is not None
        assert server.process.wait(60) == -signal.SIGKILL
        database = open_database(str(data))
        records = ScheduleRecords(database)
        (row,) = records.all()
        declaration = row["declaration"].replace('"YQ=="', '"Yg=="')  # b instead of a, as if it was changed just before
        records.change(unique, row["changed_us"], declaration, row["changed_us"] + 1, "", None)
        database.dispose()
        server = ServerProcess(data).start()
        eventually(lambda: len(_all(server.url, unique)) >= row["sent"] + 4, "messages")
        rows = _all(server.url, unique)
        each_second(rows)
        bodies = "".join(row["body"] for row in rows)
        first = len(bodies) - len(bodies.lstrip("a"))
        assert first > row["sent"] >= 1, "the instants before the kill stay as they were, marked or not"
        assert bodies[first:] == "b" * (len(bodies) - first)
        eventually(lambda: one(server.url, unique)["sent"] >= len(rows), "the marks")
    finally:
        stop_if_running(server)


class AwayRecords(ScheduleRecords):
    """Those of a registry's database that does not answer when a step is recorded."""

    is_away = True

    def mark(self, marks: Sequence[Mark]) -> set[str]:
        if self.is_away:
            raise sa.exc.OperationalError("UPDATE", {}, OSError("away"))
        return super().mark(marks)


def test_while_steps_cannot_be_recorded_no_instant_is_sent_twice_or_missed(frozen: InMemoryServer, unique: str) -> None:
    declare(frozen.url, unique, unique, cron="* * * * *", catch_up="skip")

    async def replaced(schedules: Schedules) -> tuple[AwayRecords, Schedule]:
        schedules._records = records = AwayRecords(schedules._records._engine)
        (schedule,) = schedules.own()
        return records, schedule

    records, schedule = frozen.inside(lambda running: replaced(running.schedules))
    for minute in range(1, 11):
        frozen.advance(60)
        assert len(instants(frozen, unique)) == minute
        frozen.advance(2)  # it tries to record again, and has nothing to send again
    assert one(frozen.url, unique)["sent"] == 0
    records.is_away = False
    frozen.advance(2)
    row = one(frozen.url, unique)
    assert (row["sent"], row["missed"], len(instants(frozen, unique))) == (10, 0, 10)
    assert row["last_instant"] == "2030-01-01T12:10:00.000000Z" and schedule.unrecorded is None
    frozen.advance(60)
    assert one(frozen.url, unique)["sent"] == 11


def test_a_step_that_cannot_be_recorded_of_a_schedule_that_was_deleted_meanwhile(
    frozen: InMemoryServer, unique: str
) -> None:
    async def record(schedules: Schedules) -> None:
        schedules._records = AwayRecords(schedules._records._engine)
        await schedules._record({unique: Mark(unique, "", 0, 1, 1, 0, 1, 1)}, 1)

    frozen.inside(lambda running: record(running.schedules))


def test_the_schedule_of_a_server_that_is_gone_has_an_alarm(frozen: InMemoryServer, unique: str) -> None:
    """In a registry, at the servers that are there; once a message may be missed."""

    async def add(schedules: Schedules) -> None:
        declaration = {"message": {"topic": unique, "body": ""}, "cron": "0 7 * * *"}
        await asyncio.to_thread(schedules._records.add, unique, "west", json.dumps(declaration), schedules._clock(), "")
        here = Member("a", "server", "http://127.0.0.1:9", ("transactions", "queue"), ("main",))
        schedules.place = Place(Settings(), lambda: [here], here)
        await schedules.follow()

    def alarms() -> list[str]:
        frozen.inside(lambda running: running.alarms.look())
        return [a["text"] for a in admin(frozen.url, "GET", "alarms")["alarms"] if a["name"] == "schedule"]

    frozen.inside(lambda running: add(running.schedules))
    assert alarms() == []
    frozen.advance(61)
    (text,) = alarms()
    assert "no server has the log 'west'" in text
    admin(frozen.url, "POST", f"schedules/{unique}/pause", {})
    assert alarms() == []


def test_a_machine_without_the_zone(frozen: InMemoryServer, unique: str) -> None:
    """A schedule that came from another machine; the others continue."""

    async def add(schedules: Schedules) -> None:
        declaration = {"message": {"topic": unique, "body": ""}, "cron": "0 7 * * *", "zone": "Europe/Atlantis"}
        await asyncio.to_thread(schedules._records.add, unique, "", json.dumps(declaration), schedules._clock(), "")
        await schedules.follow()

    frozen.inside(lambda running: add(running.schedules))
    declare(frozen.url, unique + "-good", unique, cron="0 * * * *")
    frozen.advance(3600)
    assert instants(frozen, unique) == ["01-01T13:00"]
    row = one(frozen.url, unique)
    assert row["state"] == "broken" and "pip install tzdata" in row["fault"]
    frozen.inside(lambda running: running.alarms.look())
    assert "sends nothing" in admin(frozen.url, "GET", "alarms")["alarms"][0]["text"]
    assert metric(frozen.url, 'notify_schedules{state="broken"}') == 1


def test_a_server_without_schedules_has_no_timer(notify_server: InMemoryServer) -> None:
    async def has_timer(schedules: Schedules) -> bool:
        return schedules._task is not None

    assert notify_server.inside(lambda running: has_timer(running.schedules)) is False


# --- several processes --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_workers_divide_schedules(tmp_path: Path, unique: str) -> None:
    server = ServerProcess(tmp_path / "data", flags=["--workers", "2"]).start()
    try:
        possible, workers = [f"{unique}-{n}" for n in range(100)], worker_names(2)
        names = [name for w in workers for name in [n for n in possible if shard_of_key(n, workers) == w][:3]]
        with TransactionProducer(server.url, group="shop") as producer:
            for name in names:
                producer.schedule(name, Message(unique, "x"), every=1, catch_up="all", catch_up_most=1000)
        assert admin(server.url, "GET", "schedules")["of"] == 6

        def rows() -> list[list[dict[str, Any]]]:
            return [_all(server.url, unique, f"/{worker}") for worker in worker_names(2)]

        # A worker has no topic before its first message, and does not answer while it starts.
        eventually(lambda: sum(map(len, rows_when_ready(rows))) >= 18, "messages of all schedules")
        os.kill(server.workers()[0], signal.SIGKILL)  # its parent starts it again
        before = sum(map(len, rows_when_ready(rows)))
        eventually(lambda: sum(map(len, rows_when_ready(rows))) >= before + 18, "messages after the kill")
        by_worker = rows_when_ready(rows)
        assert all(by_worker), "both workers send"
        for name in names:
            homes = [[r for r in each if r["headers"]["notify-schedule"] == name] for each in by_worker]
            assert sum(map(bool, homes)) == 1, (name, [len(each) for each in by_worker], one(server.url, name))
            (own,) = [each for each in homes if each]
            each_second(own)
    finally:
        stop_if_running(server)


def rows_when_ready(rows: Any) -> list[list[dict[str, Any]]]:
    def tried() -> list[list[dict[str, Any]]]:
        try:
            found: list[list[dict[str, Any]]] = rows()
        except (OSError, AssertionError):
            return []
        return found

    return eventually(tried, "both workers to answer")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mysql", marks=pytest.mark.long)])
def test_three_servers_over_one_database(kind: str, database_urls: Any, tmp_path: Path, unique: str) -> None:
    """They take turns by schedule; the instants of a server that is killed are sent by another one, each once."""
    with empty_database(kind, database_urls, tmp_path) as storage, ExitStack() as stack:
        make_storage(storage)
        started = Started(storage, tmp_path, stack)
        for _ in range(3):
            started.add()
        until_known(started.servers)
        queue = ServerProcess(tmp_path / "queue", flags=["--registry", storage, "--roles", "queue"]).start()
        stack.callback(stop_if_running, queue)
        relay = Command("relay", "--dsn", storage, "--url", queue.url).start()
        stack.callback(relay.close)
        names = [f"{unique}-{n}" for n in range(6)]
        urls = ",".join(server.url for server in started.servers)
        with TransactionProducer(urls, group="shop") as producer:
            for name in names:
                producer.schedule(name, Message(unique, name), every=1, catch_up="all", catch_up_most=1000)
        body = {"message": {"topic": unique, "body": ""}, "every": 5}
        assert ask(queue.url, "PUT", f"/v1/schedules/{unique}", body)[0] == 421
        survivor = started.servers[2]

        def sent() -> int:
            return min((row["sent"] for row in admin(survivor.url, "GET", "schedules")["schedules"]), default=0)

        eventually(lambda: sent() >= 2, "two messages of each schedule")
        for server in started.servers[:2]:
            server.kill()
        before = sent()
        eventually(lambda: sent() >= before + 6, "messages after the kills")
        for name in names:
            admin(survivor.url, "POST", f"schedules/{name}/pause", {})
        rows = stored(storage)
        for name in names:
            each_second([row for row in rows if row["headers"]["notify-schedule"] == name])
        assert {row["name"]: row["sent"] for row in admin(survivor.url, "GET", "schedules")["schedules"]} == Counter(
            row["headers"]["notify-schedule"] for row in rows
        )
        eventually(lambda: len(_all(queue.url, unique)) >= len(rows), "all messages in the queue")
        moved = _all(queue.url, unique)
        assert sorted(row["id"] for row in moved) == sorted(f"{row['id']}.0" for row in rows)


@pytest.mark.long
def test_logs_in_a_registry_send_what_was_declared_at_them(tmp_path: Path, unique: str) -> None:
    storage = f"sqlite:///{tmp_path}/servers.db"
    make_storage(storage)
    over = {"sql": ["--storage", storage]} | {n: ["--registry", storage, "--shard", n] for n in ("east", "west")}
    with ExitStack() as stack:
        servers = {}
        for name, flags in over.items():
            servers[name] = ServerProcess(tmp_path / name, flags=flags)
            stack.callback(stop_if_running, servers[name])
            servers[name].start()
        for name in ("sql", "east"):
            declare(servers[name].url, f"of-{name}", unique, every=1)
        west = servers["west"].url

        def sent() -> dict[tuple[str, str | None], int]:
            rows = admin(west, "GET", "schedules")["schedules"]
            return {(row["name"], row["shard"]): row["sent"] for row in rows if row["sent"] >= 2}

        eventually(lambda: len(sent()) == 2, "two messages of each schedule")
        assert sent().keys() == {("of-sql", None), ("of-east", "east")}
        each_second(_all(servers["east"].url, unique))
        assert {row["headers"]["notify-schedule"] for row in _all(servers["east"].url, unique)} == {"of-east"}
        assert {row["headers"]["notify-schedule"] for row in stored(storage)} == {"of-sql"}
        assert ask(west, "GET", f"/v1/topics/{unique}")[0] == 404
        # Declared again at another server, it stays where it was.
        assert declare(west, "of-east", unique, every=1)["changed"] is False
        assert one(west, "of-east")["shard"] == "east"


# --- by people ----------------------------------------------------------------------------------------------------


def test_commands_set_show_pause_and_delete_a_schedule(notify_server: InMemoryServer, unique: str) -> None:
    url = ["--url", notify_server.url]
    reason = ["--reason", "wanted daily"]
    fields = [
        "--topic",
        unique,
        "--body",
        '{"a": 1}',
        "--cron",
        "0 7 * * 1-5",
        "--zone",
        "Europe/Berlin",
        "--header",
        "h=v",
    ]
    code, dry = cli("schedule", "set", unique, *fields, *reason, "--dry-run", *url)
    assert code == 0 and "dry run" in dry["text"] and "The next instants are" in dry["text"]
    assert admin(notify_server.url, "GET", "schedules")["of"] == 0
    code, told = cli("schedule", "set", unique, *fields, *reason, *url)
    assert f"Schedule {unique} sends a message to topic {unique} at 0 7 * * 1-5 in Europe/Berlin." in told["text"]
    code, again = cli("schedule", "set", unique, *fields, *reason, *url)
    assert "nothing changes" in again["text"]
    code, listed = cli("schedule", "list", "--json", *url)
    (row,) = listed["schedules"]
    assert (row["name"], row["state"], row["cron"], len(row["next"])) == (unique, "waiting", "0 7 * * 1-5", 3)
    code, shown = cli("schedule", "show", unique, "--json", *url)
    assert (shown["body"], shown["headers"], len(shown["next"])) == ('{"a": 1}', {"h": "v"}, 10)
    for command, said in (("pause", "sends nothing until"), ("resume", "continues"), ("delete", "any more")):
        code, told = cli("schedule", command, unique, *reason, *url)
        assert code == 0 and said in told["text"], told
    assert cli("schedule", "show", unique, *url)[0] == 2
    code, refused = cli("schedule", "set", unique, "--topic", unique, "--body", "x", *reason, *url)
    assert code == 2 and "exactly one" in refused["text"]


def test_metrics_show_when_a_schedule_sends_and_how_late_it_is(frozen: InMemoryServer, unique: str) -> None:
    declare(frozen.url, unique, unique, cron="0 * * * *")
    assert metric(frozen.url, f'notify_schedule_next_seconds{{schedule="{unique}"}}') == 3600
    frozen.advance(3601)
    assert metric(frozen.url, f'notify_schedule_lag_seconds{{schedule="{unique}"}}') == 1
    frozen.advance(9)
    assert metric(frozen.url, f'notify_schedule_last_sent_seconds{{schedule="{unique}"}}') == 9
    assert metric(frozen.url, "notify_scheduled_total") == 1
    assert metric(frozen.url, 'notify_schedules{state="waiting"}') == 1
