"""Objectives of groups, such as "99 % of the messages are acknowledged within 5 s", and whether they were met lately.

A message counts from its commit, or from when it was due, until it is acknowledged: histogram `commit_to_ack`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from notify.protocol.latency import share_within
from notify.runtime.clock import Clock
from notify.server.latency import Histograms

WINDOW_US = 300_000_000
SAMPLE_US = 30_000_000
"""How often counts are kept: a window is longer than WINDOW_US by at most this."""
MOST_OBJECTIVES = 1000


@dataclass(frozen=True, slots=True)
class Objective:
    """The share of a group's messages (0 to 1) that should be acknowledged within `seconds`."""

    within: float
    share: float = 0.99


class Met(NamedTuple):
    """The messages that a group acknowledged in the last five minutes, and the share of them within its objective."""

    messages: int
    share: float | None
    """None if there were no messages."""


class Objectives:
    """The objectives of all groups, and samples of the groups' histograms, from which the last minutes are told."""

    def __init__(self, latencies: Histograms, clock: Clock) -> None:
        """`latencies`: the times from commit to acknowledgement, by group."""
        self._latencies = latencies
        self._clock = clock
        self.by_group: Mapping[str, Objective] = {}
        self._samples: dict[str, deque[tuple[int, Sequence[int]]]] = {}
        """The counts of each group that has an objective, with their time, the oldest first."""

    def follow(self, objectives: Mapping[str, Objective]) -> None:
        """Judge by these objectives from now on."""
        self.by_group = objectives
        for group in self._samples.keys() - objectives.keys():
            del self._samples[group]
        self.sample()

    def sample(self) -> None:
        """Keep the counts of now, to be compared with later ones."""
        now_us = self._clock()
        for group in self.by_group:
            samples = self._samples.setdefault(group, deque())
            if not samples or not 0 <= now_us - samples[-1][0] < SAMPLE_US:
                samples.append((now_us, self._latencies.counts(group)))
            while len(samples) > 1 and not 0 <= now_us - samples[0][0] < WINDOW_US + SAMPLE_US:
                samples.popleft()

    def lack_figures_of(self, group: str) -> bool:
        """Whether a group has an objective, and acknowledged nothing lately: what waits tells how it does."""
        return group in self.by_group and self.met(group).share is None

    def met(self, group: str) -> Met:
        """The messages that a group with an objective acknowledged since the first of its samples."""
        samples = self._samples.get(group)
        if not samples:
            return Met(0, None)
        # A group that was deleted and made again begins at zero.
        counts = [max(0, n - then) for n, then in zip(self._latencies.counts(group), samples[0][1], strict=True)]
        return Met(sum(counts), share_within(counts, self.by_group[group].within))
