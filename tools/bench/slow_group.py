"""Measures how one stopped group affects the other groups and the producers, if all groups read the newest messages."""

from __future__ import annotations

from typing import Any

from notify.cli.bench.runner import Bench, subscribe
from tools.bench.compare.ratios import Spread


def run(
    *,
    groups: int = 15,
    clients: int = 256,
    rate: float = 0.0,
    seconds: float = 5.0,
    runs: int = 5,
    body: int = 256,
) -> dict[str, Any]:
    """Measure the median ratios of the rates with one stopped group to those with all groups running.

    `groups` on one topic, producers at `rate` transactions/s (0: as fast as possible), in `runs` alternating runs. With
    a fixed rate the figures show whether all groups keep up; without a fixed rate, how they share the machine. Raises
    NotifyError.
    """
    with Bench() as bench:
        url = bench.server().url
        names = [f"group-{n}" for n in range(groups)]
        for group in names:
            subscribe(url, group, "bench-0")

        def rates(*slow: str) -> tuple[float, float]:
            """One run: transactions/s, and deliveries/s of all groups except the first."""
            consumers = bench.consume(url, names, slow=slow)
            made = bench.produce(url, clients=clients, seconds=seconds, body=body, topics=1, rate=rate).result()
            received = {group["group"]: group for group in consumers.result()["groups"]}
            delivered = sum(received[name]["unique"] / received[name]["seconds"] for name in names[1:])
            return made["committed"] / made["seconds"], delivered

        pairs = [(rates(), rates(names[0])) for _ in range(runs)]
    producers, others = (
        Spread.from_ratios([stopped[at] / running[at] for running, stopped in pairs]).as_json() for at in (0, 1)
    )
    return {
        "ratio_others": others["median"],
        "ratio_producers": producers["median"],
        "spread_others": [others["min"], others["max"]],
        "spread_producers": [producers["min"], producers["max"]],
        "lost": 0,
        "duplicated": 0,
        "flush": "sync",
    }
