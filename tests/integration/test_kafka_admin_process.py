"""The process in which Kafka is asked for groups: whoever asks survives its end, and it survives nobody who asks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from notify.errors import Unavailable
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import ask
from tests.support.kafka import KafkaNode, commit_offsets

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from notify.cli.kafka import allowed
from notify.cli.kafka.seen import Seen
from notify.kafka import admin_process
from notify.kafka.admin_process import AdminProcess
from notify.kafka.cluster import Cluster
from notify.kafka.group_questions import progress_of_all
from notify.kafka.progress import Progress
from notify.kafka.rights import GROUP, Need, Needs
from notify.server.groups.kafka.snapshot import take
from tests.support.kafka_consumers import make_topic
from tests.support.kafka_proxy import Api, Fault, Which

CHILD = b"notify.kafka.admin_process_child"


@pytest.fixture
def server(kafka_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    running = ServerProcess(tmp_path / "looks", flags=["--kafka", f"{kafka_url}?client.id=hunter2"]).start()
    yield running
    running.stop()


def looked(server: ServerProcess) -> int:
    """The status of a route that always asks the brokers; 404: Kafka has no such group."""
    return ask(server.url, "GET", "/v1/admin/groups/none")[0]


def children(server: ServerProcess) -> list[int]:
    """The processes that this server started and that have not ended."""
    assert server.process is not None
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if state(pid)[1] == server.process.pid]


def state(pid: int) -> tuple[str, int]:
    """A process's state, and the one that started it; `Z` also where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return fields[0], int(fields[1]) if fields[0] != "Z" else 0


def child(server: ServerProcess) -> int:
    eventually(lambda: looked(server) == 404, "the brokers to answer")
    (pid,) = children(server)
    return pid


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGABRT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_server_goes_on_when_the_process_that_asks_kafka_dies(server: ServerProcess, number: int) -> None:
    first = child(server)
    command = Path(f"/proc/{first}/cmdline").read_bytes()
    assert CHILD in command
    assert b"hunter2" not in command  # settings may be secret
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        look = threads.submit(looked, server)  # it waits for the process that stands still
        os.kill(first, number)
        os.kill(first, signal.SIGCONT)
        assert look.result(PATIENCE_SECONDS) in (404, 503)
    assert child(server) != first


@pytest.mark.long
def test_interrupts_are_for_the_server(server: ServerProcess) -> None:
    first = child(server)
    os.kill(first, signal.SIGINT)
    os.kill(first, signal.SIGTERM)
    assert child(server) == first


@pytest.mark.long
@pytest.mark.parametrize("stands_still", [pytest.param(False, marks=pytest.mark.long), True])
def test_no_process_is_left_when_the_server_stops(server: ServerProcess, stands_still: bool) -> None:
    pid = child(server)
    if stands_still:
        os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert state(pid)[0] == "Z"


@pytest.mark.long
def test_no_process_is_left_when_the_server_is_killed(server: ServerProcess) -> None:
    pid = child(server)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGKILL)
    eventually(lambda: state(pid)[0] == "Z", "the process to notice the end of its server")


def test_a_refusal_passes_from_the_process() -> None:
    with closing(AdminProcess(Cluster.of("kafka://127.0.0.1:9"))) as process, pytest.raises(KafkaException):
        process.ask(partial(AdminClient.list_topics, timeout=0.1))


@pytest.mark.long
def test_a_process_that_hangs_is_killed_and_replaced(kafka_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(AdminProcess(Cluster.of(kafka_url))) as process:
        assert process.ask(take).unknown == frozenset()
        with monkeypatch.context() as patch:
            patch.setattr(admin_process, "ANSWER_SECONDS", 0)  # no process is so quick
            with pytest.raises(TimeoutError):
                process.ask(take)
        assert process.ask(take).unknown == frozenset()


# --- audits and check-ups -----------------------------------------------------------------------------------------


@pytest.fixture
def aborting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """A function that has the next processes abort, so many of them, as Kafka's client does now and then."""

    def abort(times: int) -> None:
        left = tmp_path / "left"
        left.write_text("x" * times)
        planted = (
            f"import os, pathlib; p = pathlib.Path({str(left)!r}); t = p.read_text(); p.write_text(t[1:])\n"
            f"if t: os.abort()\n{admin_process.CHILD}"
        )
        monkeypatch.setattr(admin_process, "CHILD", planted)

    return abort


@pytest.fixture
def group(kafka_url: str, unique: str) -> str:
    """A group that has done three records of the topic of its name."""
    make_topic(kafka_url, unique)
    consumer = Cluster.of(kafka_url).consumer({"group.id": unique})
    commit_offsets(consumer, TopicPartition(unique, 0, 3, Progress(3).metadata()))
    consumer.close()
    return unique


def test_an_audit_survives_an_abort_of_kafkas_client(
    kafka_url: str, group: str, aborting: Callable[[int], None]
) -> None:
    """It asked itself, and an abort ended it: also the audit that watches for days."""
    pytest.importorskip("pyspark")
    from notify.spark.inputs.kafka_groups import KafkaGroups

    aborting(1)
    assert list(KafkaGroups.of(Cluster.of(kafka_url)).progress[group].values()) == [Progress(3)]
    aborting(9)
    with pytest.raises(Unavailable, match=r"ended \(SIGABRT\); try again"):
        KafkaGroups.of(Cluster.of(kafka_url))


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, pytest.param(Fault.HELD, marks=pytest.mark.long)])
def test_a_broker_that_does_not_list_its_groups_is_not_one_without_groups(
    kafka_node: KafkaNode, group: str, fault: Fault
) -> None:
    """Kafka's client returns an empty list, with the error beside it: an audit judged as if nobody had subscribed."""
    admin = Cluster.of(kafka_node.url).admin()
    planned = kafka_node.proxy.plan(Which(Api.LIST_GROUPS), fault)
    with pytest.raises(KafkaException):
        progress_of_all(admin)
    kafka_node.proxy.withdraw(planned)
    assert list(progress_of_all(admin)[group].values()) == [Progress(3)]


@pytest.mark.long
def test_a_check_up_survives_an_abort_of_kafkas_client(
    kafka_url: str, group: str, aborting: Callable[[int], None]
) -> None:
    lacking = (Need(GROUP, group, ("Read",), "positions"),)
    seen = Seen.look(Cluster.of(kafka_url))
    aborting(1)
    assert [line.level for line in allowed.lines(seen, Needs("consumer", lacking))] == ["ok"]
    aborting(9)
    (line,) = allowed.lines(seen, Needs("consumer", lacking))
    assert (line.level, "SIGABRT" in line.text) == ("unknown", True)
