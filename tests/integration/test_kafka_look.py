"""The process in which a server asks Kafka for all groups: the server survives its end, and it survives no server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import ask

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException

from notify.kafka.cluster import Cluster
from notify.server.groups.kafka import look_process
from notify.server.groups.kafka.look_process import LookProcess

CHILD = b"notify.server.groups.kafka.look_child"


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
    assert looked(server) == 404
    (pid,) = children(server)
    return pid


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
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


def test_interrupts_are_for_the_server(server: ServerProcess) -> None:
    first = child(server)
    os.kill(first, signal.SIGINT)
    os.kill(first, signal.SIGTERM)
    assert child(server) == first


@pytest.mark.parametrize("stands_still", [False, True])
def test_no_process_is_left_when_the_server_stops(server: ServerProcess, stands_still: bool) -> None:
    pid = child(server)
    if stands_still:
        os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert state(pid)[0] == "Z"


def test_no_process_is_left_when_the_server_is_killed(server: ServerProcess) -> None:
    pid = child(server)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGKILL)
    eventually(lambda: state(pid)[0] == "Z", "the process to notice the end of its server")


def test_a_refusal_passes_from_the_process() -> None:
    process = LookProcess(Cluster.of("kafka://127.0.0.1:9"))
    with pytest.raises(KafkaException):
        process.take()
    process.close()


def test_a_process_that_hangs_is_killed_and_replaced(kafka_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = LookProcess(Cluster.of(kafka_url))
    assert process.take().unknown == frozenset()
    with monkeypatch.context() as patch:
        patch.setattr(look_process, "ANSWER_SECONDS", 0)  # no process is so quick
        with pytest.raises(TimeoutError):
            process.take()
    assert process.take().unknown == frozenset()
    process.close()
