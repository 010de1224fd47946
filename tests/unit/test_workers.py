"""Workers without processes: how many a directory has, for whom a connection is, answers that are added up."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from pathlib import Path

import pytest

from notify.admin_api.declaration import FanOut
from notify.errors import InvalidRequest
from notify.protocol.workers import (
    check_count,
    divide,
    refuse_divided,
    refuse_one_of_several,
    remember_logs,
    workers_of,
)
from notify.server.settings import Settings
from notify.server.spread import spread
from notify.server.spread.combining import columns, combined
from notify.server.spread.cursors import allot, offsets, shares
from notify.server.spread.rules import job_number, job_of, rule_of
from notify.server.workers import acceptor
from notify.server.workers.acceptor import PEEKED, Acceptor, worker_of
from notify.server.workers.heartbeat import Silence, beat_seconds, state_in, waits_for_disk
from notify.server.workers.parent import said_in
from tests.support.clock import eventually


def test_a_directory_remembers_how_many_workers_it_has(tmp_path: Path) -> None:
    divide(tmp_path, 2)
    divide(tmp_path, 2)
    assert workers_of(tmp_path) == 2
    for other in (1, 3):
        with pytest.raises(InvalidRequest, match="start it with --workers 2"):
            check_count(tmp_path, other)
    with pytest.raises(InvalidRequest, match="name --log for each of them, worker-1="):
        refuse_divided(tmp_path, "name --log")


def test_a_worker_that_has_lost_its_log_is_not_started_with_a_new_one(tmp_path: Path) -> None:
    """As where its disk is not mounted. What ended before each had made its log begins again."""
    divide(tmp_path, 2)
    logs = [tmp_path / name / "log" for name in ("worker-1", "worker-2")]
    for log in logs:
        check_count(tmp_path, 2)
        log.mkdir(parents=True)
        (log / "00000000000000000000.log").touch()
    remember_logs(tmp_path)
    divide(tmp_path, 2)
    assert workers_of(tmp_path) == 2
    (logs[1] / "00000000000000000000.log").unlink()
    with pytest.raises(InvalidRequest, match=r"worker-2 has lost its log: .* write {\"workers\": 2} into"):
        check_count(tmp_path, 2)
    (tmp_path / "workers.json").write_text('{"workers": 2}')
    check_count(tmp_path, 2)


def test_the_log_of_one_worker_is_not_served_alone(tmp_path: Path) -> None:
    divide(tmp_path, 2)
    with pytest.raises(InvalidRequest, match="start notify serve --workers 2"):
        refuse_one_of_several(tmp_path / "worker-2")
    refuse_one_of_several(tmp_path / "worker-3")
    refuse_one_of_several(tmp_path)


def test_a_directory_that_is_served_otherwise_is_not_divided(tmp_path: Path) -> None:
    (tmp_path / "one" / "log").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="without --workers"):
        divide(tmp_path / "one", 2)
    (tmp_path / "workers.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="does not say how many"):
        workers_of(tmp_path)


def test_logs_that_were_put_into_a_directory_say_how_many_workers_it_has(tmp_path: Path) -> None:
    """As after a restore of each worker's backup, which leaves nothing that says so."""
    (tmp_path / "worker-4").mkdir()  # perhaps a disk of its own, still empty
    (tmp_path / "worker-3" / "log").mkdir(parents=True)
    for count in (1, 2, 3):
        with pytest.raises(InvalidRequest, match="has the logs of worker-3 alone"):
            divide(tmp_path, count)
    for name in ("worker-1", "worker-2"):
        (tmp_path / name / "log").mkdir(parents=True)
    for count in (1, 2, 4):
        with pytest.raises(InvalidRequest, match="start it with --workers 3"):
            divide(tmp_path, count)
    divide(tmp_path, 3)
    assert workers_of(tmp_path) == 3


@pytest.mark.parametrize(
    ("first", "worker"),
    [
        (b"GET /worker-2/v1/limits HTTP/1.1\r\n", 1),
        (b"POST /worker-12/v1/messages HTTP", 11),
        (b"GET /v1/limits HTTP/1.1\r\n", -1),
        (b"GET /worker-2x/ HTTP/1.1\r\n", -1),
        (b"GET /worker-123/ HTTP/1.1\r\n", -1),
        (b"GET / HTTP/1.1\r\n", -1),
        (b"\x16\x03\x01\x02\x00", -1),
        (b"get /", -1),
        (b"G", None),
        (b"POST", None),
        (b"POST /wor", None),
        (b"POST /worker-1", None),
        (b"A" * PEEKED, -1),
    ],
)
def test_the_first_bytes_of_a_connection_say_for_whom_it_is(first: bytes, worker: int | None) -> None:
    assert worker_of(first) == worker


def test_counts_are_added_up_and_policies_are_said_once() -> None:
    row = {"name": "t", "ttl": 5.0, "lag": 2, "newest_at": "1", "queues": [{"queue": 0, "end": 3}], "paused": False}
    other = row | {"lag": 5, "newest_at": "2", "queues": [{"queue": 0, "end": 4}], "paused": True}
    made = combined(("a", "b"), [{"topics": [row]}, {"topics": [other, {"name": "u", "lag": 1}]}])
    assert made["topics"] == [
        {
            "name": "t",
            "ttl": 5.0,
            "lag": 7,
            "newest_at": "2",
            "queues": [{"queue": 0, "end": 3, "worker": "a"}, {"queue": 0, "end": 4, "worker": "b"}],
            "paused": True,
        },
        {"name": "u", "lag": 1},
    ]


def test_a_message_that_one_worker_does_not_know_is_another_ones() -> None:
    items = [[{"id": "x", "status": 404}, {"id": "y", "status": 201}], [{"id": "x", "status": 201}]]
    made = combined(("a", "b"), [{"items": rows} for rows in items])
    assert made["items"] == [{"id": "x", "status": 201}, {"id": "y", "status": 201}]


def test_a_list_of_dead_letters_goes_on_at_each_worker_behind_what_was_shown() -> None:
    """Two workers with 3 and 1 letters, 2 a page: every letter once, the newest first."""
    letters = {"a": [(2, 50), (1, 30), (0, 10)], "b": [(0, 40)]}
    rule = rule_of("GET", "groups/g/dead-letters", {})
    query = {"newest": "true", "max": "2"}
    pages: list[list[str]] = []
    while len(pages) < 9:
        asked = {name: mine for name in letters if (mine := rule.query(name, query)) is not None}
        answers = []
        for name, mine in asked.items():
            before = int(mine.get("before", 0)) or 99
            left = [row for row in letters[name] if row[0] < before]
            rows = [{"offset": offset, "dead_at": str(at)} for offset, at in left[:2]]
            answers.append({"messages": rows, "next_before": rows[-1]["offset"] if len(left) > 2 else 0})
        page = rule.combine(list(asked), answers, query)
        pages.append([row["dead_at"] for row in page["messages"]])
        if not page["next_before"]:
            break
        query = query | {"before": page["next_before"]}
    assert pages == [["50", "40"], ["30", "10"]]


def test_a_bound_on_the_whole_is_divided_among_workers_by_turns() -> None:
    ids = [["a", "b", "c"], [], ["d", "e"]]
    assert shares(ids, 3) == [["a", "b"], [], ["d"]]
    assert shares(ids, 4) == [["a", "b"], [], ["d", "e"]]
    assert shares(ids, 9) == ids


def test_a_redrive_goes_on_at_each_worker_where_its_search_ended() -> None:
    """A worker of whose letters some are left out looks for them again; one that has seen all is not asked again."""
    names = ("w-1", "w-2", "w-3")
    previews = {"w-1": (["a", "b"], 7), "w-2": (["c"], 0), "w-3": ([], 9)}

    def divided(most: int, places: dict[str, int]) -> tuple[str | int, list[list[str]]]:
        answers = {n: {"result": {"ids": ids, "next_offset": place}} for n, (ids, place) in previews.items()}
        following = allot(answers, most, places, names)
        return following, [answer["result"]["ids"] for answer in answers.values()]

    assert divided(2, dict.fromkeys(names, 5)) == ("w-1:5,w-2:-,w-3:9", [["a"], ["c"], []])
    assert divided(9, dict.fromkeys(names, 5)) == ("w-1:7,w-2:-,w-3:9", [["a", "b"], ["c"], []])
    del previews["w-1"], previews["w-3"]
    assert divided(9, {"w-2": 5}) == (0, [["c"]])
    assert offsets(0, names) == dict.fromkeys(names, 0)
    assert offsets("w-1:7,w-2:-,w-3:9", names) == {"w-1": 7, "w-3": 9}
    for text in (5, "w-1:-", "w-1:x", "5", None):
        with pytest.raises(InvalidRequest, match="its own address, such as …/w-1"):
            offsets(text, names)


def test_charts_are_added_up_at_each_time() -> None:
    one = {"span": "hour", "at": [60, 120], "lag": [1.0, 2.0], "oldest_seconds": [3.0, None]}
    two = {"span": "hour", "at": [120, 180], "lag": [5.0, None], "oldest_seconds": [1.0, 2.0]}
    assert columns(("a", "b"), [one, two]) == {
        "span": "hour",
        "at": [60, 120, 180],
        "lag": [1.0, 7.0, None],
        "oldest_seconds": [3.0, 1.0, 2.0],
    }


def test_metrics_of_workers_are_one_text() -> None:
    text = '# HELP a_b Text of a\n# TYPE a_b gauge\na_b{topic="t"} 1.0\n# HELP c Text\n# TYPE c counter\nc_total 2.0\n'
    assert spread.joined({"worker-1": text, "worker-2": text}) == (
        '# HELP a_b Text of a\n# TYPE a_b gauge\na_b{worker="worker-1",topic="t"} 1.0\n'
        'a_b{worker="worker-2",topic="t"} 1.0\n'
        '# HELP c Text\n# TYPE c counter\nc_total{worker="worker-1"} 2.0\nc_total{worker="worker-2"} 2.0\n'
    )


def test_jobs_of_workers_have_numbers_of_their_own() -> None:
    assert [job_of(job_number(worker, 7)) for worker in (0, 63)] == [(0, 7), (63, 7)]


def test_every_admin_route_has_a_rule() -> None:
    assert rule_of("GET", "settings", {}).asked is FanOut.HERE
    assert rule_of("PUT", "topics/t", {}).asked is FanOut.ALL
    assert rule_of("POST", "transactions/x/commit", {}).asked is FanOut.KNOWING
    assert rule_of("GET", "messages", {"id": "x"}).asked is FanOut.KNOWING
    assert rule_of("POST", "topics/t/messages", {}).asked is FanOut.OF_KEY
    assert rule_of("POST", "jobs/101/cancel", {}).asked is FanOut.JOB
    assert rule_of("POST", "messages/republish", {}).asked is FanOut.OF_EACH
    assert rule_of("POST", "backups", {}).asked is FanOut.NONE
    assert rule_of("POST", "groups/g/held-keys/skip", {}).asked is FanOut.ALL


def test_tenants_of_all_workers_are_one_list_by_what_waits() -> None:
    answers = [
        {"tenants": [{"tenant": "a", "waiting": 5}, {"tenant": "b", "waiting": 1}], "of": 2, "waiting": 6},
        {"tenants": [{"tenant": "a", "waiting": 3}], "of": 1, "waiting": 3},
    ]
    combined = rule_of("GET", "groups/g/tenants", {"max": "2"}).combine(["one", "two"], answers, {"max": "2"})
    assert [(row["waiting"], row["worker"]) for row in combined["tenants"]] == [(5, "one"), (3, "two")]
    assert (combined["of"], combined["waiting"]) == (3, 9)


def test_held_keys_of_all_workers_are_one_list_by_age() -> None:
    answers = [
        {"held": [{"key": "a", "since": "2"}, {"key": "b", "since": "4"}], "of": 2, "waiting": 1, "stopped": ["t/0"]},
        {"held": [{"key": "c", "since": "1"}, {"key": "d", "since": "3"}], "of": 9, "waiting": 2, "stopped": []},
    ]
    query = {"max": "3"}
    combined = rule_of("GET", "groups/g/held-keys", query).combine(["one", "two"], answers, query)
    assert [(row["key"], row["worker"]) for row in combined["held"]] == [("c", "two"), ("a", "one"), ("d", "two")]
    assert (combined["of"], combined["waiting"], combined["stopped"]) == (11, 3, ["t/0"])


def group_row(name: str, lag: int, dead_letters: int = 0, consumers: int = 1) -> dict[str, object]:
    return {"name": name, "lag": lag, "dead_letters": dead_letters, "consumers": consumers, "paused": False,
            "oldest_seconds": None, "latency": {"commit_to_ack": None, "handler": None}}  # fmt: skip


def test_the_first_groups_are_those_of_all_workers_together() -> None:
    answers = [
        {"groups": [group_row("a", 9), group_row("b", 5), group_row("c", 0, 1, 0)], "of": 3},
        {"groups": [group_row("b", 5), group_row("a", 0), group_row("c", 1, 1, 0)], "of": 3},
    ]
    query = {"sort": "lag", "max": "1"}
    rule = rule_of("GET", "groups", query)
    assert rule.query("one", query) == {"sort": "lag", "max": "1000000"}
    combined = rule.combine(["one", "two"], answers, query)
    assert [(row["name"], row["lag"]) for row in combined["groups"]] == [("b", 10)] and combined["of"] == 3
    for sort, names in {"pain": "cba", "dead_letters": "cab", "name": "abc"}.items():
        rows = rule.combine(["one", "two"], answers, {"sort": sort})["groups"]
        assert "".join(row["name"] for row in rows) == names
    assert rule.query("one", {"max": "1"}) == {"max": "1"}


@pytest.mark.parametrize("noun", ["topics", "groups"])
def test_a_topic_or_group_may_have_the_name_of_a_part_of_a_path(noun: str) -> None:
    chart = rule_of("GET", f"{noun}/t/history", {}).combine
    assert rule_of("GET", f"{noun}/history/history", {}).combine is chart
    for name in ("history", "priorities", "messages"):
        assert rule_of("GET", f"{noun}/{name}", {}) == rule_of("GET", f"{noun}/t", {})


def test_one_server_divides_no_keys() -> None:
    assert Settings().key_shards == ()
    assert Settings(workers=2).key_shards == ("worker-1", "worker-2")


def test_a_worker_may_be_ready_and_fail_before_its_parent_reads_either() -> None:
    assert said_in(b'{"topics": 1}\n{"failed": "full"}\n{"to') == ([{"topics": 1}, {"failed": "full"}], b'{"to')
    assert said_in(b"") == ([], b"")


class Turns:
    """A parent's look at its one worker, on a clock that the test moves."""

    def __init__(self, timeout_seconds: float) -> None:
        self.now = 100.0
        self.silence = Silence(1, timeout_seconds, lambda: self.now)

    def pass_by(self, seconds: float, turn_seconds: float, beats: bool = False) -> None:
        for _ in range(round(seconds / turn_seconds)):
            self.now += turn_seconds
            if beats:
                self.silence.heard(0)
            self.silence.look()


def test_a_worker_that_gives_no_sign_of_life_is_left_alone_and_then_killed() -> None:
    turns = Turns(30)
    turns.pass_by(60, 1.0, beats=True)
    assert not turns.silence.is_silent(0)
    turns.pass_by(4.5, 0.5)
    assert not turns.silence.is_silent(0)
    turns.pass_by(25, 0.5)
    assert turns.silence.is_silent(0) and not turns.silence.is_over_long(0)
    turns.pass_by(2, 0.5)
    assert turns.silence.is_over_long(0)
    turns.silence.heard(0)
    turns.silence.look()
    assert not turns.silence.is_silent(0) and not turns.silence.is_over_long(0)


def test_time_in_which_the_parent_did_not_run_is_held_against_no_worker() -> None:
    """A machine that slept for an hour, and one that is so loaded that the parent has a turn every 10 s."""
    turns = Turns(30)
    turns.pass_by(3600, 3600)
    turns.pass_by(2, 1.0)
    assert not turns.silence.is_silent(0)
    turns.silence.heard(0)
    turns.pass_by(40, 10)
    assert not turns.silence.is_silent(0)
    turns.pass_by(300, 10)  # its worker does not run either: but this long it is not the machine
    assert turns.silence.is_over_long(0)


def test_signs_of_life_come_often_enough_for_a_short_timeout() -> None:
    assert [beat_seconds(seconds) for seconds in (1, 2, 30, 3600)] == [0.2, 0.4, 1.0, 1.0]


def test_the_state_of_a_process_is_read_whatever_its_name() -> None:
    assert state_in("7 (a ) R (b) D 1 7 7") == "D"
    assert state_in(Path("/proc/self/stat").read_text()) == "R"
    assert not waits_for_disk(os.getpid())


@pytest.mark.long
def test_the_parent_holds_no_more_silent_connections_than_its_files_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go to the workers at once; it accepted nothing until they had been silent for long enough."""
    monkeypatch.setattr(acceptor, "open_files", lambda: 40)
    selector = selectors.DefaultSelector()
    handed: list[int] = []
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        door = Acceptor(selector, listening, lambda number, connection: not handed.append(number))
        stack.callback(door.close, stop_watching=True)
        door.open()
        for _ in range(13):
            stack.enter_context(socket.create_connection(listening.getsockname()))

        def turn() -> bool:
            for key, _ in selector.select(0):
                key.data()
            door.tick()
            return len(handed) == 3

        eventually(turn, "the three that are too many")
        assert handed == [-1, -1, -1]
