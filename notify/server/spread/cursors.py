"""Where a list continues at each worker, such as `worker-1:12,worker-2:-`; and what each worker does of one write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notify.errors import InvalidRequest
from notify.protocol.limits import digits
from notify.server.spread.combining import Answer

OVER = "-"
"""The mark, instead of an offset, of a worker whose part has ended."""


def parsed(text: str) -> dict[str, str]:
    """The place of each worker that the text names."""
    pairs = [part.partition(":") for part in text.split(",") if ":" in part]
    return {name: place for name, _, place in pairs}


def written(names: Sequence[str], places: Mapping[str, str]) -> str | int:
    """The text for these workers' places; 0 if all have ended."""
    is_over = all(places.get(name) == OVER for name in names)
    return 0 if is_over else ",".join(f"{name}:{place}" for name, place in places.items())


def offsets(value: object, names: Sequence[str]) -> dict[str, int]:
    """The offset at which a request continues at each worker whose part has not ended. Raises InvalidRequest."""
    if value == 0:
        return dict.fromkeys(names, 0)
    places = parsed(value) if isinstance(value, str) else {}
    found = {name: digits(places[name]) for name in names if places.get(name, OVER) != OVER}
    if not found or None in found.values():
        raise InvalidRequest(
            "offset is the `next_offset` of an earlier answer of all workers; for an offset of one worker send the "
            f"request to that worker at its own address, such as …/{names[0]}",
            "names_no_worker",
        )
    return {name: place for name, place in found.items() if place is not None}


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
