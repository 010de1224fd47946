"""Ratios of Notify's figures to a peer's, round by round, and the verdict over all runs.

A rate is what a consumer can get. For the callers' rates these are the committed messages that a consumer could get
when the callers stopped, by the time they took; at best Notify's are delivered and acknowledged as well, which is more
than is asked of the peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.compare.ratios import Spread, Verdict
from tools.bench.peers.rounds import Measured, Round
from tools.bench.peers.system import System, Work

NOTIFY = "notify"
KEPT_PACE = 0.9
"""A system that reaches less of the paced rate is overloaded: its latencies are not those at that rate."""


@dataclass(frozen=True, slots=True)
class Row:
    """One compared figure: its key in the JSON, its name for people, and the names of both sides' figures."""

    key: str
    label: str
    ours: str
    theirs: str
    is_latency: bool = False


BEST = "best"
PACED = {"end_to_end": "paced", "handler": "paced_handler"}
"""By the first part of a latency's name, the rate that was reached as it was measured."""


def rows(work: Work) -> list[Row]:
    """The compared figures, in the order of the table."""
    callers = []
    for n in work.callers:
        name, theirs = f"{n:,} caller{'s' * (n > 1)}", f"visible_{n}"
        callers += [
            Row(str(n), f"{name}, visible transactions/s", f"visible_{n}", theirs),
            Row(f"{n}_awaited", f"{name}, ours waiting for the outcome", f"awaited_{n}", theirs),
        ]
    paced = f"{work.pace:,} transactions/s, from commit to handler, ours"
    drained = f"a pile of {work.pile:,}, messages/s of one group"
    handled = f"a pile of {work.handled:,}, messages/s of"
    fan_out = f"fan-out 1:{work.groups}, deliveries/s in sum"
    return [
        *callers,
        Row(BEST, "at best, acknowledged by the bare client, by the peer's best visible", "delivered", BEST),
        Row(
            "best_settled",
            "the same, by the peer's best with the time until all are visible",
            "delivered",
            "best_settled",
        ),
        Row("best_recorded", "at best, recorded only, by the peer's best visible", "best_recorded", BEST),
        *_latencies(f"{paced} the bare client", "end_to_end"),
        *_latencies(f"{paced} a Consumer's handler", "handler"),
        Row("drain", f"{drained}, ours the bare client", "drain", "drain"),
        Row("drain_handler", f"{handled} a Consumer's handler", "drain_handler", "drain"),
        Row("drain_batches", f"{handled} its handler of batches", "drain_batches", "drain"),
        Row("fan_out", f"{fan_out}, ours the bare client", "fan_out", "fan_out"),
        Row("fan_out_handler", f"{fan_out}, ours AsyncConsumers' handlers", "fan_out_handler", "fan_out"),
    ]


def _latencies(label: str, ours: str) -> list[Row]:
    return [
        Row(f"{ours}_{part}", f"{label}, {part} (ms)", f"{ours}_{part}", f"end_to_end_{part}", is_latency=True)
        for part in ("p50", "p99")
    ]


def figures(measured: Measured) -> dict[str, float]:
    """All figures of a system in a round, and the best of its callers'."""
    found = dict(measured.figures)
    for kind, name in (("visible_", BEST), ("settled_", "best_settled"), ("recorded_", "best_recorded")):
        rates = [value for figure, value in measured.figures.items() if figure.startswith(kind)]
        if rates:
            found[name] = max(rates)
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds of a run. `missing`: why a system was not started, by its name."""

    systems: Sequence[System]
    work: Work
    rounds: Sequence[Round]
    missing: Mapping[str, str]

    def peers(self) -> list[System]:
        return [system for system in self.systems if system.name != NOTIFY]

    def values(self, name: str, figure: str) -> list[float]:
        """A figure of a system, of the rounds that have it."""
        measured = [each.systems[name] for each in self.rounds if name in each.systems]
        return [value for each in measured if (value := figures(each).get(figure)) is not None]

    def spread(self, peer: str, row: Row) -> Spread | None:
        """The ratios of the rounds that have both sides; None where there is none."""
        ratios = []
        for each in self.rounds:
            if peer in each.systems and NOTIFY in each.systems:
                ratio = self._ratio(figures(each.systems[NOTIFY]), figures(each.systems[peer]), row)
                ratios += [ratio] if ratio is not None else []
        return Spread.from_ratios(ratios) if ratios else None

    def _ratio(self, ours: Mapping[str, float], theirs: Mapping[str, float], row: Row) -> float | None:
        if row.is_latency:
            rate = ours.get(PACED[row.ours.rpartition("_")[0]], 0)
            if min(rate, theirs.get("paced", 0)) < KEPT_PACE * self.work.pace:
                return None
        if not theirs.get(row.theirs) or row.ours not in ours:
            return None
        return ours[row.ours] / theirs[row.theirs]

    def reasons(self) -> list[str]:
        """Why figures are missing, a line each."""
        lines = [f"{self._title(name)} was not measured: {reason}" for name, reason in self.missing.items()]
        for each in self.rounds:
            for name, measured in each.systems.items():
                if measured.reason:
                    lines.append(f"{self._title(name)}, round {each.number}: {measured.reason}")
                rates = [measured.figures[rate] for rate in PACED.values() if rate in measured.figures]
                for paced in [rate for rate in rates if rate < KEPT_PACE * self.work.pace]:
                    lines.append(
                        f"{self._title(name)}, round {each.number}: it reached {paced:,.0f} of {self.work.pace:,} "
                        "transactions/s, so that its latencies are not compared"
                    )
        return lines

    def _title(self, name: str) -> str:
        return next(system.title for system in self.systems if system.name == name)

    def verdict(self) -> Verdict:
        """FAIL where a run lost or doubled messages, INCONCLUSIVE where a system did not do all of the work."""
        wrong = [
            f"{self._title(name)} lost {measured.lost} and doubled {measured.doubled} in round {each.number}"
            for each in self.rounds
            for name, measured in each.systems.items()
            if measured.lost or measured.doubled
        ]
        if wrong:
            return Verdict("FAIL", "; ".join(wrong))
        unfinished = {name for each in self.rounds for name, measured in each.systems.items() if measured.reason}
        unfinished |= set(self.missing)
        if unfinished or not self.rounds:
            names = ", ".join(sorted(self._title(name) for name in unfinished)) or "no system"
            return Verdict("INCONCLUSIVE", f"not everything was measured ({names}): the reasons are above")
        best = [
            f"{spread.median:.2f} times {peer.title}"
            for peer in self.peers()
            if (spread := self.spread(peer.name, _best(self.work))) is not None
        ]
        return Verdict("PASS", f"nothing lost, nothing doubled; delivered at best {', '.join(best)}")

    def as_json(self, machine: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
        """The whole run; keys of what was not measured are null."""
        spreads = {
            f"to_{peer.name}": {row.key: self.spread(peer.name, row) for row in rows(self.work)}
            for peer in self.peers()
        }
        return {
            "machine": dict(machine),
            "versions": dict(versions),
            "rounds": [each.as_json() for each in self.rounds],
            **{to: {key: _median(spread) for key, spread in found.items()} for to, found in spreads.items()},
            "spread": {
                to: {key: spread and spread.as_json() for key, spread in found.items()} for to, found in spreads.items()
            },
            "not_measured": self.reasons(),
            "verdict": str(self.verdict()),
        }


def _best(work: Work) -> Row:
    return next(row for row in rows(work) if row.key == BEST)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else round(spread.median, 4)
