"""Ratios of two runs' figures (head by base), their spread over the pairs, and the verdict of the bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RATE = "rate"
CPU = "cpu_per_transaction"
CLIENT_CPU = "client_cpu_per_transaction"
LABELS = {CPU: "CPU a transaction", CLIENT_CPU: "CPU of the client"}
LATENCIES = {"p50": "p50_ms", "p99": "p99_ms"}
EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}


class NoRate(ValueError):
    """A run reports no rate, or a rate of zero, so that it has no ratio."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The ratios of all pairs. Half of them lie between the quartiles; one pair is its own quartiles."""

    median: float
    minimum: float
    quartiles: tuple[float, float]
    maximum: float

    @classmethod
    def from_ratios(cls, ratios: Sequence[float]) -> Spread:
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        return cls(middle, min(ratios), (low, high), max(ratios))

    def as_json(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "median": round(self.median, 4),
            "min": round(self.minimum, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "max": round(self.maximum, 4),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """PASS, FAIL or INCONCLUSIVE, and why."""

    word: str
    reason: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def __str__(self) -> str:
        return f"{self.word} {self.reason}"


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """The compared figures of one run, by name. Raises NoRate.

    `rate` is the first key that ends in `_per_second`. Where there is none (`topics`), the keys that start with
    `ratio_` are the rates, under their own names. `cpu_per_transaction` is the CPU time of the server in microseconds,
    user and system, by whatever the rate counts: `cores` is the server's CPU seconds by seconds of the clock. The
    bridge reports it as such. `client_cpu_per_transaction` is the CPU time of the load processes. What a run does not
    report, or reports as zero, has no ratio and is left out.
    """
    key = next((name for name in result if name.endswith("_per_second")), None)
    rates = {RATE: result[key]} if key else {name: result[name] for name in result if name.startswith("ratio_")}
    if not rates or not all(rates.values()):
        raise NoRate("it reports no rate, or a rate of zero")
    cpu = result.get("queue_cpu_us_a_row")
    if key and result.get("cores"):
        cpu = result["cores"] / result[key] * 1e6
    client_cpu = result["client_cores"] / result[key] * 1e6 if key and result.get("client_cores") else None
    others = {CPU: cpu, CLIENT_CPU: client_cpu} | {name: result.get(reported) for name, reported in LATENCIES.items()}
    return {name: float(value) for name, value in (rates | others).items() if value}


def spreads(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, Spread]:
    """The spread of each figure that every run has: head by base, pair by pair. The pairs are (base, head)."""
    runs = [run for pair in pairs for run in pair]
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: Spread.from_ratios([head[name] / base[name] for base, head in pairs]) for name in names}


def judge(measured: Mapping[str, Spread], rate_at_least: float | None, cpu_at_most: float | None) -> Verdict:
    """The medians against the bars that were given; without bars a PASS that states them, with their quartiles.

    A median on the right side of its bar passes. One on the wrong side fails if three quarters of the pairs are there
    too, that is if the quartile nearer to the bar is; otherwise the spread does not allow a verdict.
    """
    words, reasons = {"PASS"}, []
    rates = [name for name in measured if name not in (CPU, CLIENT_CPU, *LATENCIES)]
    cpus = [CPU, CLIENT_CPU] if CLIENT_CPU in measured else [CPU]
    bars = [(name, rate_at_least, True) for name in rates] + [(name, cpu_at_most, False) for name in cpus]
    for name, bar, at_least in bars:
        if bar is None:
            continue
        if name not in measured:
            words.add("INCONCLUSIVE")
            reasons.append(f"{label(name)} is not reported by every run")
            continue
        word, reason = _against(measured[name], bar, at_least)
        words.add(word)
        reasons.append(f"{label(name)} {reason}")
    if not reasons:
        reasons = [
            f"{label(name)} {spread.median:.3f} ({spread.quartiles[0]:.3f} to {spread.quartiles[1]:.3f})"
            for name, spread in measured.items()
        ]
    worst = next(word for word in ("FAIL", "INCONCLUSIVE", "PASS") if word in words)
    return Verdict(worst, ", ".join(reasons))


def _against(spread: Spread, bar: float, at_least: bool) -> tuple[str, str]:
    low, high = spread.quartiles
    median, limit = f"{spread.median:.3f}", f"at {'least' if at_least else 'most'} {bar:g}"
    if spread.median >= bar if at_least else spread.median <= bar:
        return "PASS", f"{median} ({limit})"
    between = f"half of the pairs between {low:.3f} and {high:.3f}"
    if high < bar if at_least else low > bar:
        return "FAIL", f"{median} is not {limit}, {between}"
    return "INCONCLUSIVE", f"{median} is not {limit}, but the spread does not allow a verdict, {between}"


def label(name: str) -> str:
    """A figure's name for people."""
    return LABELS.get(name, name)
