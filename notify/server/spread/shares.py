"""Divides a write of at most `max` rows among workers: each worker in turn gets one of its ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notify.server.spread.combining import Answer
from notify.server.spread.cursors import OVER, written


def allot(answers: Mapping[str, Answer], most: int, places: Mapping[str, int], names: Sequence[str]) -> str | int:
    """Cut the previews of workers to `most` ids in all; returns where the next request continues, 0 if nowhere.

    `places`: the offset from which each worker looked. A worker whose ids are cut looks from there again.
    """
    parts = shares([answer["result"]["ids"] for answer in answers.values()], most)
    following = dict.fromkeys(names, OVER)
    for (name, answer), ids in zip(answers.items(), parts, strict=True):
        is_cut = len(ids) < len(answer["result"]["ids"])
        following[name] = str(places[name] if is_cut else answer["result"]["next_offset"] or OVER)
        answer["result"]["ids"] = ids
    return written(names, following)


def shares(ids: Sequence[Sequence[str]], most: int) -> list[list[str]]:
    """For each worker its first ids, at most `most` ids in all; `ids`: the ids of each worker, in its order."""
    counts = [0] * len(ids)
    remaining = min(most, sum(map(len, ids)))
    while remaining:
        for worker, worker_ids in enumerate(ids):
            if remaining and counts[worker] < len(worker_ids):
                counts[worker] += 1
                remaining -= 1
    return [list(worker_ids[:count]) for worker_ids, count in zip(ids, counts, strict=True)]
