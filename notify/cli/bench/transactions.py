"""`notify bench transactions`: measures halves and outcomes sent with the SDK by other processes, and verifies them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from notify.cli.bench.runner import Bench, Process, subscribe
from notify.cli.bench.verify import count_in_queues, missing_in_database
from notify.errors import NotifyError
from notify.testing import usage
from notify.testing.process import ServerProcess

GROUP = "bench"
"""The group that consumes."""
CLIENTS = ("wire", "plain", "threads", "coroutines")
"""Those that receive: the bare client, which calls no handler; and with an empty handler a short
script, the SDK's Consumer, and its AsyncConsumer."""


def run(
    *,
    clients: int = 128,
    processes: int = 1,
    body: int = 256,
    topics: int = 16,
    seconds: float = 8.0,
    warmup: float = 2.0,
    rate: float = 0.0,
    consume: bool = False,
    end_to_end: bool = False,
    batching: bool = True,
    queues_outcomes: bool = False,
    url: str | None = None,
    storage: str | None = None,
    workers: int = 1,
    keys: int = 0,
    client: str = "wire",
) -> dict[str, Any]:
    """Measure `clients` callers in `processes` processes, and return the figures by name.

    `rate`: transactions/s in total, 0: no limit. With `queues_outcomes` a caller continues once its outcome is queued,
    as a session of the SDK does after its commit; a transaction counts once its outcome is acknowledged. With `consume`
    and `end_to_end` each transaction is timed from its caller's commit to the consumer. `client`: what consumes, one of
    CLIENTS. Raises NotifyError if a process could not run.
    """
    if consume and workers > 1:
        raise NotifyError("the benches' consumers ask one worker only: measure --workers without --consume")
    with Bench() as bench:
        server: ServerProcess | None = None
        if url is None:
            server = bench.server("data", *_flags(storage, workers))
            url = server.url
        consumer = _start_consumer(bench, url, topics, client, end_to_end) if consume else None
        loads = [
            bench.produce(
                url, clients=clients // processes + (number < clients % processes), all_clients=clients,
                seconds=seconds, warmup=warmup, body=body, topics=topics, keys=keys, rate=rate, batching=batching,
                queues_outcomes=queues_outcomes, commits=bench.file("commits") if end_to_end else None,
            )
            for number in range(processes)
        ]  # fmt: skip
        cpu = _Cpu(server)
        time.sleep(warmup)
        cpu.begin()
        time.sleep(seconds)
        cpu.end()
        results = [load.result(300) for load in loads]
        consumed = consumer.result() if consumer is not None else None
        wrong = _verify(url, storage, results, consumed)
        summary = _summary(results, consumed, cpu.cores, *wrong)
        if end_to_end and consumer is not None:
            summary |= _end_to_end(consumer.spec["handled"], [load.spec["commits"] for load in loads])
        return summary


def _flags(storage: str | None, workers: int) -> list[str]:
    """The server's flags; makes the tables of its storage."""
    flags = ["--workers", str(workers)] if workers > 1 else []
    if storage is not None:
        from notify.storage.sql import schema
        from notify.storage.sql.engines import open_engine

        schema.upgrade(open_engine(storage), "main")
        flags += ["--storage", storage]
    return flags


def _start_consumer(bench: Bench, url: str, topics: int, client: str, end_to_end: bool) -> Process:
    names = [f"bench-{n}" for n in range(topics)]
    if client in ("wire", "plain"):
        for topic in names:
            subscribe(url, GROUP, topic)
    timed = {"handled": bench.file("handled")} if end_to_end else {}
    return bench.consume(url, [GROUP], client=client, topics=names, seen=bench.file("seen"), **timed)


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
    results: list[dict[str, Any]], consumed: dict[str, Any] | None, cores: float | None, lost: int, duplicated: int
) -> dict[str, Any]:
    latencies = sorted(latency for result in results for latency in result["latencies"])
    summary: dict[str, Any] = {
        "transactions_per_second": round(sum(result["committed"] / result["seconds"] for result in results)),
        "p50_ms": _percentile(latencies, 0.5),
        "p99_ms": _percentile(latencies, 0.99),
        "committed": sum(result["acknowledged"] for result in results),
        "delivered": consumed["delivered"] if consumed else None,
        "lost": lost,
        "duplicated": duplicated,
        "flush": "sync",
        "cores": round(cores, 3) if cores is not None else None,
        "client_cores": round(sum(result["cpu"] / result["seconds"] for result in results), 2),
        "errors": sum(result["errors"] for result in results),
    }
    if consumed:
        summary["delivered_per_second"] = round(consumed["per_second"])
        summary["handler_p50_ms"] = _percentile(consumed["latencies"], 0.5)
        summary["handler_p99_ms"] = _percentile(consumed["latencies"], 0.99)
    return summary


def _end_to_end(handled_file: str, commits_files: list[str]) -> dict[str, float | None]:
    """Percentiles of the time from a caller's commit to the consumer."""
    handled: dict[str, float] = json.loads(Path(handled_file).read_text())
    commits = [json.loads(Path(file).read_text()) for file in commits_files]
    latencies = sorted(handled[id_] - at for by_id in commits for id_, at in by_id.items() if id_ in handled)
    return {
        "end_to_end_p50_ms": _percentile(latencies, 0.5),
        "end_to_end_p99_ms": _percentile(latencies, 0.99),
    }


def _verify(
    url: str, storage: str | None, results: list[dict[str, Any]], consumed: dict[str, Any] | None
) -> tuple[int, int]:
    """The numbers of lost transactions and duplicated messages, from the queues or from the consumer's counts."""
    acknowledged: set[str] = set()
    for result in results:
        acknowledged.update(Path(result["ids"]).read_text().split())
    if storage is not None:
        return missing_in_database(storage, acknowledged), 0
    counts_file = consumed["counts_file"] if consumed else None
    if counts_file is not None:
        counts: dict[str, int] = json.loads(Path(counts_file).read_text())
    else:
        counts = count_in_queues(url, "bench-")
    return len(acknowledged - counts.keys()), sum(1 for count in counts.values() if count > 1)


def _percentile(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 3) if values else None
