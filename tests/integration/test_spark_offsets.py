"""Where a query of Spark over topics begins, how far it goes, and what it reads: without Spark, from a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
from hypothesis import given
from hypothesis import strategies as st

from notify.errors import Forbidden, InvalidRequest, NotFound, Unauthorized, Unavailable
from notify.spark.messages import offsets
from notify.spark.messages.infer import inferred
from notify.spark.messages.offsets import TopicOffsets, from_json, from_text, to_json
from notify.spark.messages.options import Options
from notify.spark.messages.planning import Planning, behind, shares
from notify.spark.messages.reading import Reading
from notify.spark.messages.server import TopicState
from notify.testing.process import ServerProcess
from notify.testing.server import InMemoryServer
from tests.support.authority import Authority
from tests.support.http import admin, call
from tests.support.servers import GuardedInMemory

TOPIC = "orders"


@pytest.fixture
def running() -> Iterator[InMemoryServer]:
    with InMemoryServer() as server:
        make(server, 2)
        yield server


@pytest.fixture(scope="module")
def unchanged() -> Iterator[InMemoryServer]:
    with InMemoryServer() as server:
        make(server, 2)
        yield server


def make(server: InMemoryServer, queues: int) -> None:
    admin(server.url, "PUT", f"topics/{TOPIC}", {"queues": queues})


def send(server: InMemoryServer, first: int, end: int) -> None:
    messages = [{"topic": TOPIC, "key": f"k{n}", "body": json.dumps({"n": n})} for n in range(first, end)]
    call(server.url, "POST", "/v1/messages", {"messages": messages})


def options(server: InMemoryServer, **given: Any) -> Options:
    return Options.of({"servers": server.url, "topics": TOPIC} | {k: str(v) for k, v in given.items()}, "earliest")


def plan(server: InMemoryServer, **given: Any) -> Planning:
    return Planning(options(server, timeoutSeconds=1, **given))


def numbers(server: InMemoryServer, start: offsets.Offsets, end: offsets.Offsets, **given: Any) -> list[int]:
    """The numbers of the messages between two offsets, as tasks read them."""
    chosen = options(server, **given)
    planning = Planning(chosen)
    try:
        with Reading(chosen) as reading:
            batches = [batch for piece in planning.pieces(start, end) for batch in reading.rows(piece)]
    finally:
        planning.close()
    return [json.loads(body)["n"] for batch in batches for body in batch.column("body").to_pylist()]


def test_micro_batches_have_a_bound_and_each_message_once(running: InMemoryServer) -> None:
    send(running, 0, 50)
    planning = plan(running)
    at, read = planning.beginning(), []
    while (following := planning.following(at, 7)) != at:
        rows = numbers(running, at, following, rowsPerPartition=3)
        assert 0 < len(rows) <= 7
        read += rows
        at = from_json(json.loads(json.dumps(to_json(following))))
        assert at == following
    assert sorted(read) == list(range(50))
    send(running, 50, 53)
    make(running, 4)
    send(running, 53, 90)
    assert sorted(numbers(running, at, planning.latest())) == list(range(50, 90))  # new queues from their first message
    assert planning.following(at, None) == planning.latest() or set(planning.latest()[TOPIC].next) == {0, 1, 2, 3}
    planning.close()


def test_a_query_begins_where_it_is_told(running: InMemoryServer) -> None:
    send(running, 0, 10)
    running.advance(100)
    send(running, 10, 20)
    everything = plan(running).latest()

    def begins(text: str) -> list[int]:
        return sorted(numbers(running, plan(running, startingOffsets=text).beginning(), everything))

    assert begins("earliest") == list(range(20)) and begins("latest") == []
    first = call(running.url, "GET", f"/v1/topics/{TOPIC}/queues/0/messages?offset=0")["messages"]
    since = max(m["committed_at"] for m in first)
    assert set(begins(since)) <= set(range(10, 20)) and begins("1990-01-01T00:00:00Z") == list(range(20))
    assert begins("2990-01-01T00:00:00Z") == []
    ends = {str(queue): end for queue, end in everything[TOPIC].next.items()}
    assert begins(json.dumps({TOPIC: ends})) == []
    assert len(begins(json.dumps({TOPIC: ends | {"0": ends["0"] - 2}}))) == 2
    assert begins(json.dumps(to_json(everything))) == []  # as a checkpoint has it


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "write earliest"), ("2026-11-23T08:00:00", "write earliest"), ("{", "offsets are JSON"),
        ('{"orders": 5}', "offsets are JSON"), ('{"orders": {"0": -1}}', "offsets are JSON"),
        ('{"orders": {"x": 1}}', "offsets are JSON"), ('{"other": {"0": 1}}', "no offsets of"),
        ('{"orders": {"0": 99}}', "beyond it"),
    ],
)  # fmt: skip
def test_wrong_starting_offsets_are_refused(unchanged: InMemoryServer, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plan(unchanged, startingOffsets=text).beginning()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topic": "orders"}, "there is none"), ({"topics": ""}, "name the topics"), ({"servers": ""}, "address"),
        ({"maxRowsPerTrigger": "0"}, "number from 1"), ({"failOnDataLoss": "perhaps"}, "true or false"),
        ({"token": "a", "tokenFile": "b"}, "one of them"), ({"topics": "a b"}, "topic"),
    ],
)  # fmt: skip
def test_options_that_are_none_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Options.of({"servers": "http://127.0.0.1:1", "topics": "orders"} | given, "earliest")


def test_rows_dropped_before_they_were_read_are_reported(running: InMemoryServer) -> None:
    make(running, 2)
    send(running, 0, 40)
    planning = plan(running)
    start = planning.beginning()
    send(running, 40, 80)
    end = planning.latest()
    admin(running.url, "POST", f"topics/{TOPIC}/purge", {"before": "latest", "force": True})
    with pytest.raises(NotFound, match="the server no longer has") as lost:
        planning.following(start, None)
    assert (lost.value.code, "failOnDataLoss" in str(lost.value)) == ("data_loss", True)
    with pytest.raises(NotFound, match="the server no longer has"):
        numbers(running, start, end)
    assert numbers(running, start, end, failOnDataLoss="false") == []
    send(running, 80, 90)
    now = plan(running, failOnDataLoss="false").following(start, None)
    assert sorted(numbers(running, start, now, failOnDataLoss="false")) == list(range(80, 90))
    assert sorted(numbers(running, plan(running).beginning(), now)) == list(range(80, 90))  # a new query


def test_a_topic_that_was_deleted_and_made_again_is_noticed(running: InMemoryServer) -> None:
    send(running, 0, 10)
    planning = plan(running)
    start = planning.latest()
    admin(running.url, "DELETE", f"topics/{TOPIC}", {})
    with pytest.raises(NotFound, match="there is no topic"):
        planning.following(start, None)
    make(running, 1)
    send(running, 10, 15)
    with pytest.raises(NotFound, match="recreated"):
        planning.following(start, None)
    now = plan(running, failOnDataLoss="false").following(start, None)
    assert numbers(running, start, now, failOnDataLoss="false") == list(range(10, 15))


def test_offsets_behind_the_end_of_a_queue(running: InMemoryServer) -> None:
    send(running, 0, 10)
    planning = plan(running)
    end = planning.latest()
    beyond = {TOPIC: TopicOffsets(end[TOPIC].number, {0: 1000, 1: 0})}
    with pytest.raises(NotFound, match="was read up to 1000"):
        planning.following(beyond, None)
    assert plan(running, failOnDataLoss="false").following(beyond, None)[TOPIC].next == end[TOPIC].next


def test_a_server_that_is_away_is_waited_for_within_a_bound(running: InMemoryServer) -> None:
    send(running, 0, 10)
    planning = plan(running)
    start = planning.beginning()
    running.restart()
    assert planning.following(start, None) == planning.latest()
    running.stop()
    with pytest.raises(Unavailable):
        planning.following(start, None)


def test_offsets_take_a_token_with_the_right_to_read_the_topic(tmp_path: Path) -> None:
    with GuardedInMemory() as server:
        body = {"queues": 1, "reason": "a test"}
        call(server.url, "PUT", f"/v1/admin/topics/{TOPIC}", body, server.admin)
        given = {"servers": server.url, "topics": TOPIC, "timeoutSeconds": "1"}

        def latest(**more: str) -> Any:
            planning = Planning(Options.of(given | more, "earliest"))
            try:
                return planning.latest()
            finally:
                planning.close()

        reader, other = server.make(f"read:{TOPIC}"), server.make("read:others")
        (tmp_path / "token").write_text(reader + "\n")
        assert latest(token=reader) == latest(tokenFile=str(tmp_path / "token")) != {}
        with pytest.raises(Forbidden):
            latest(token=other)
        with pytest.raises(Unauthorized):
            latest()


def test_offsets_are_read_over_tls_by_the_servers_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    environment = {"NOTIFY_TLS_CERTIFICATE": str(authority.issue("server"))}
    server = ServerProcess(tmp_path / "data", environment=environment, ca=authority.file).start()
    try:
        given = {"servers": server.url, "topics": TOPIC, "timeoutSeconds": "1"}
        with closing(Planning(Options.of(given | {"ca": str(authority.file)}, "earliest"))) as planning:
            with pytest.raises(NotFound, match="there is no topic"):
                planning.latest()
        with closing(Planning(Options.of(given, "earliest"))) as planning:
            with pytest.raises(Unavailable):
                planning.latest()
        with pytest.raises(InvalidRequest, match="options ca"):
            Planning(Options.of(given | {"ca": str(tmp_path / "none")}, "earliest"))
    finally:
        server.stop()


def test_the_type_of_bodies_is_inferred_from_the_newest(running: InMemoryServer) -> None:
    send(running, 0, 10)
    assert inferred(options(running)) == "`n`: bigint"
    admin(running.url, "POST", f"topics/{TOPIC}/purge", {"before": "latest", "force": True})
    with pytest.raises(InvalidRequest, match="give it as DDL"):
        inferred(options(running))


# --- what a restore leaves free --------------------------------------------------------------------------------------

APART = 1 << 32


def test_spans_leave_out_what_a_restore_left_free() -> None:
    state = TopicState(1, {0: (0, APART + 20)}, {0: [(10, APART + 10), (APART + 15, APART + 16)]})
    assert list(state.spans(0, 5, APART + 20)) == [(5, 10), (APART + 10, APART + 15), (APART + 16, APART + 20)]
    assert list(state.spans(0, 12, 100)) == [] and list(state.spans(0, 12, APART + 11)) == [(APART + 10, APART + 11)]
    assert list(state.spans(1, 0, 3)) == [(0, 3)]
    spans = list(state.spans(0, 5, APART + 20))
    assert behind(5, 5, spans) == 10 and behind(5, 6, spans) == APART + 11 and behind(5, 100, spans) == APART + 20


@given(st.dictionaries(st.tuples(st.just("t"), st.integers(0, 20)), st.integers(0, 10_000)), st.integers(1, 5000))
def test_shares_of_a_micro_batch(left: dict[tuple[str, int], int], most: int) -> None:
    taken = shares(left, most)
    assert all(0 <= taken[queue] <= left[queue] for queue in left)
    assert sum(taken.values()) == min(most, sum(left.values()))
    if most >= len(left):
        assert all(taken[queue] > 0 for queue in left if left[queue])


def test_offsets_as_people_write_them() -> None:
    assert from_text('{"orders": {"0": 5}}') == {"orders": TopicOffsets(0, {0: 5})}
