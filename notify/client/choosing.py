"""The choice among servers that could take a producer's requests: those of its room, and of these the idle ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from notify.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that answers, as the registry knows it."""

    url: str
    room: str = ""
    """Where it stands: its setting `room`; empty where it says nothing."""
    load: float = 0.0
    """Transactions that it stored in a second, as of a second or two ago."""


Chooser = Callable[[Sequence[Candidate], str], Candidate]
"""A function that is given the candidates (one at least) and the client's own room, and returns one of them."""


def room_then_load(candidates: Sequence[Candidate], room: str) -> Candidate:
    """One of the client's room, if there is any, else any one; the less a server has to do, the likelier.

    Chance decides, not the load alone: clients that choose at once, after a server has failed, would all take one.
    """
    near = [candidate for candidate in candidates if room and candidate.room == room] or list(candidates)
    return random.choices(near, [1 / (1 + max(0.0, candidate.load)) for candidate in near])[0]


def chosen_by(chooser: Chooser, candidates: Sequence[Candidate], room: str) -> str:
    """The address of the candidate that a chooser takes. Raises InvalidRequest where it fails or takes none."""
    try:
        chosen = chooser(candidates, room)
    except Exception as error:
        raise InvalidRequest(f"the chooser raised {type(error).__name__}: {error}") from error
    url = getattr(chosen, "url", None)
    urls = [candidate.url for candidate in candidates]
    if url not in urls:
        shown = repr(chosen if url is None else url)[:60]
        raise InvalidRequest(f"the chooser returned {shown}, which is none of {', '.join(urls)}")
    return str(url)
