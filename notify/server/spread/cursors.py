"""The place where a list or a search continues at each worker: `worker-1:12,worker-2:-`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notify.errors import InvalidRequest
from notify.limits import digits

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
            "request to that worker at its own address (GET /v1/members)",
            "names_no_worker",
        )
    return {name: place for name, place in found.items() if place is not None}
