"""`notify bench transactions`: measures halves and outcomes sent with the SDK by other processes, and verifies them."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.cli.bench import children
from notify.cli.bench.requests import subscribe
from notify.cli.bench.verify import count_in_queues, missing_in_database
from notify.errors import NotifyError
from notify.testing import usage
from notify.testing.process import ServerProcess

GROUP = "bench"
"""The group that consumes."""
CLIENTS = ("wire", "plain", "threads", "coroutines")
"""Those that receive: the benches' own client of the wire, which calls no handler; and with an empty handler a short
script, the SDK's Consumer, and its AsyncConsumer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load: `clients` callers in `processes` processes, `rate` transactions/s in total (0: no limit).

    With `queues_outcomes` a caller continues once its outcome is queued, as a session of the SDK does after its commit;
    a transaction counts once its outcome is acknowledged. With `consume` and `end_to_end` each transaction is timed
    from its caller's commit to the consumer. `client`: what consumes, one of CLIENTS.
    """

    clients: int = 128
    processes: int = 1
    body: int = 256
    topics: int = 16
    seconds: float = 8.0
    warmup: float = 2.0
    rate: float = 0.0
    consume: bool = False
    end_to_end: bool = False
    batching: bool = True
    queues_outcomes: bool = False
    url: str | None = None
    storage: str | None = None
    workers: int = 1
    keys: int = 0
    client: str = "wire"


def run(plan: Plan) -> dict[str, Any]:
    """Measure, and return the figures by name. Raises NotifyError if a process could not run."""
    if plan.consume and plan.workers > 1:
        raise NotifyError("the benches' consumers ask one worker only: measure --workers without --consume")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server: ServerProcess | None = None
        url = plan.url
        if url is None:
            flags = []
            if plan.storage is not None:
                from notify.storage.sql import schema
                from notify.storage.sql.engines import open_engine

                schema.upgrade(open_engine(plan.storage), "main")
                flags = ["--storage", plan.storage]
            if plan.workers > 1:
                flags = ["--workers", str(plan.workers)]
            server = ServerProcess(directory / "data", flags=flags).start()
            stack.callback(server.stop)
            url = server.url
        consumer = _start_consumer(plan, url, directory) if plan.consume else None
        if consumer is not None:
            stack.callback(children.end, consumer)
        loads = [_start_load(plan, url, directory, number) for number in range(plan.processes)]
        for load in loads:
            stack.callback(children.end, load)
        cpu = _Cpu(server)
        time.sleep(plan.warmup)
        cpu.begin()
        time.sleep(plan.seconds)
        cpu.end()
        results = [children.result(load, 300) for load in loads]
        consumed = _finish_consumer(consumer, directory) if consumer is not None else None
        summary = _summary(plan, url, results, consumed, cpu)
        if plan.end_to_end:
            summary |= _end_to_end(directory)
        return summary


def _start_load(plan: Plan, url: str, directory: Path, number: int) -> subprocess.Popen[str]:
    share = plan.clients // plan.processes + (number < plan.clients % plan.processes)
    return children.start_load(
        url,
        directory / f"ids-{number}",
        clients=share,
        all_clients=plan.clients,
        seconds=plan.seconds,
        warmup=plan.warmup,
        body=plan.body,
        topics=plan.topics,
        keys=plan.keys,
        rate=plan.rate,
        batching=plan.batching,
        queues_outcomes=plan.queues_outcomes,
        commits=str(directory / f"commits-{number}") if plan.end_to_end else None,
    )


def _start_consumer(plan: Plan, url: str, directory: Path) -> subprocess.Popen[str]:
    topics = [f"bench-{n}" for n in range(plan.topics)]
    if plan.client in ("wire", "plain"):
        for topic in topics:
            subscribe(url, GROUP, topic)
    spec: dict[str, Any] = {
        "url": url, "topics": topics, "groups": [GROUP], "client": plan.client,
        "seen": str(directory / "seen"), "stop": str(directory / "stop"),
    }  # fmt: skip
    if plan.end_to_end:
        spec["handled"] = str(directory / "handled")
    return children.start("notify.cli.bench.clients", spec, wait_for_line=True)


def _finish_consumer(child: subprocess.Popen[str], directory: Path) -> dict[str, Any]:
    (directory / "stop").touch()
    return children.result(child)


class _Cpu:
    """Measures the cores that the server uses between `begin` and `end`."""

    def __init__(self, server: ServerProcess | None) -> None:
        self._server = server
        self._began = self._cpu_before = 0.0
        self.cores: float | None = None

    def begin(self) -> None:
        if self._server is not None:
            self._began, self._cpu_before = time.perf_counter(), self._seconds(self._server)

    def end(self) -> None:
        if self._server is not None:
            self.cores = (self._seconds(self._server) - self._cpu_before) / (time.perf_counter() - self._began)

    @staticmethod
    def _seconds(server: ServerProcess) -> float:
        """The CPU time of the server and its workers so far."""
        return server.cpu_seconds() + sum(map(usage.cpu_seconds, server.workers()))


def _summary(
    plan: Plan, url: str, results: list[dict[str, Any]], consumed: dict[str, Any] | None, cpu: _Cpu
) -> dict[str, Any]:
    latencies = sorted(latency for result in results for latency in result["latencies"])
    lost, duplicated = _verify(plan, url, results, consumed)
    summary: dict[str, Any] = {
        "transactions_per_second": round(sum(result["committed"] / result["seconds"] for result in results)),
        "p50_ms": _percentile(latencies, 0.5),
        "p99_ms": _percentile(latencies, 0.99),
        "committed": sum(result["acknowledged"] for result in results),
        "delivered": consumed["delivered"] if consumed else None,
        "lost": lost,
        "duplicated": duplicated,
        "flush": "sync",
        "cores": round(cpu.cores, 3) if cpu.cores is not None else None,
        "client_cores": round(sum(result["cpu"] / result["seconds"] for result in results), 2),
        "errors": sum(result["errors"] for result in results),
    }
    if consumed:
        summary["delivered_per_second"] = round(consumed["per_second"])
        summary["handler_p50_ms"] = _percentile(consumed["latencies"], 0.5)
        summary["handler_p99_ms"] = _percentile(consumed["latencies"], 0.99)
    return summary


def _end_to_end(directory: Path) -> dict[str, float | None]:
    """Percentiles of the time from a caller's commit to the consumer."""
    handled: dict[str, float] = json.loads((directory / "handled").read_text())
    commits = [json.loads(file.read_text()) for file in directory.glob("commits-*")]
    latencies = sorted(handled[id_] - at for by_id in commits for id_, at in by_id.items() if id_ in handled)
    return {
        "end_to_end_p50_ms": _percentile(latencies, 0.5),
        "end_to_end_p99_ms": _percentile(latencies, 0.99),
    }


def _verify(plan: Plan, url: str, results: list[dict[str, Any]], consumed: dict[str, Any] | None) -> tuple[int, int]:
    """The numbers of lost transactions and duplicated messages, from the queues or from the consumer's counts."""
    acknowledged: set[str] = set()
    for result in results:
        acknowledged.update(Path(result["ids"]).read_text().split())
    if plan.storage is not None:
        return missing_in_database(plan.storage, acknowledged), 0
    counts_file = consumed["counts_file"] if consumed else None
    if counts_file is not None:
        counts: dict[str, int] = json.loads(Path(counts_file).read_text())
    else:
        counts = count_in_queues(url, "bench-")
    return len(acknowledged - counts.keys()), sum(1 for count in counts.values() if count > 1)


def _percentile(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 3) if values else None
