"""Notify itself: `notify serve` with its log, measured by the benches transactions and delivery.

Each run has a server of its own with an empty log, and two seconds that are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from notify.cli.bench import transactions
from tools.bench import delivery
from tools.bench.peers.system import BODY, Run, Step, Work, usual_steps

BATCH = 500
"""Messages in a call of the handler of batches."""
WARM_CALLERS, WARM_SECONDS = 128, 3.0


class NotifyServer:
    """Notify as the working tree has it."""

    name = "notify"
    title = "Notify"

    def version(self) -> str:
        return metadata.version("notify-tx")

    @contextmanager
    def started(self, directory: Path, work: Work) -> Iterator[Notify]:
        yield Notify(work)


class Notify:
    """Measures Notify; each run starts and stops a server of its own."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def warm_up(self) -> None:
        """Have the code in the page cache, as the peers' is, and let the machine settle."""
        transactions.run(clients=WARM_CALLERS, seconds=WARM_SECONDS, topics=1, body=BODY)

    def steps(self) -> list[Step]:
        most = max(self._work.callers)
        delivered = Step(f"{most:,} callers, delivered and acknowledged", lambda: self.delivered(most))
        awaiting = [
            Step(f"{callers:,} waiting for outcomes", partial(self.awaited, callers)) for callers in self._work.callers
        ]
        work = self._work
        handled = [
            Step(f"{work.pace:,} transactions/s, to a Consumer", self.paced_handler),
            Step(f"a pile of {work.handled:,}, a Consumer", partial(self.handled, "drain_handler", "threads", 1)),
            Step(
                f"a pile of {work.handled:,}, a Consumer with batch={BATCH}",
                partial(self.handled, "drain_batches", "threads", 1, BATCH),
            ),
            Step(
                f"fan-out 1:{work.groups}, AsyncConsumers",
                partial(self.handled, "fan_out_handler", "coroutines", work.groups),
            ),
        ]
        return [*usual_steps(self, self._work), *awaiting, delivered, *handled]

    def _transactions(self, clients: int, **options: Any) -> dict[str, Any]:
        return transactions.run(clients=clients, seconds=self._work.seconds, topics=1, body=BODY, **options)

    def transactions(self, callers: int) -> Run:
        """As a session does: its caller continues once the outcome is queued, and what is counted was acknowledged.

        An acknowledged commit is in its queue: all that is recorded is visible, as the verification shows.
        """
        got = self._transactions(callers, queues_outcomes=True)
        rate = got["transactions_per_second"]
        figures = {f"{name}_{callers}": rate for name in ("recorded", "visible", "settled")}
        return _run(figures | {f"p50_{callers}": got["p50_ms"], f"p99_{callers}": got["p99_ms"]}, got)

    def awaited(self, callers: int) -> Run:
        """Figure `awaited_N`: transactions a second of callers that wait until their outcome is recorded."""
        got = self._transactions(callers)
        return _run({f"awaited_{callers}": got["transactions_per_second"]}, got)

    def delivered(self, callers: int) -> Run:
        """Figure `delivered`: messages a second that a consumer has acknowledged, beside as many callers."""
        got = self._transactions(callers, consume=True)
        return _run({"delivered": got["delivered_per_second"]}, got)

    def paced(self) -> Run:
        return self._paced("wire", "paced", "end_to_end")

    def paced_handler(self) -> Run:
        """Figures `paced_handler`, `handler_p50` and `handler_p99`: as `paced`, to the handler of a Consumer."""
        return self._paced("threads", "paced_handler", "handler")

    def _paced(self, client: str, rate: str, latency: str) -> Run:
        got = self._transactions(
            self._work.paced_callers, rate=self._work.pace, consume=True, end_to_end=True, client=client
        )
        latencies = {f"{latency}_{part}": got[f"end_to_end_{part}_ms"] for part in ("p50", "p99")}
        return _run({rate: got["transactions_per_second"], **latencies}, got)

    def drain(self) -> Run:
        return self._delivery("drain", 1, self._work.pile)

    def fan_out(self) -> Run:
        return self._delivery("fan_out", self._work.groups, self._work.fan_out)

    def handled(self, figure: str, client: str, groups: int, batch: int | None = None) -> Run:
        """A rate of the SDK's consumers with an empty handler: messages a second of all groups together."""
        return self._delivery(figure, groups, self._work.handled // groups, client=client, batch=batch)

    def _delivery(self, figure: str, groups: int, messages: int, **options: Any) -> Run:
        got = delivery.run(groups=groups, messages=messages, body=BODY, **options)
        return _run({figure: got["deliveries_per_second"]}, got)


def _run(figures: dict[str, float], got: dict[str, Any]) -> Run:
    failed = got.get("errors")
    return Run(figures, got["lost"], got["duplicated"], f"{failed:,} transactions failed" if failed else "")
