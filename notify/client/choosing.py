"""How a client chooses one of several servers: one in its own room if possible, preferring less loaded servers."""

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
    """The server's setting `room`; empty if it has none."""
    load: float = 0.0
    """Transactions per second that the server stored, as of a second or two ago."""


Chooser = Callable[[Sequence[Candidate], str], Candidate]
"""A function that gets the candidates (at least one) and the client's room, and returns one of the candidates."""


def room_then_load(candidates: Sequence[Candidate], room: str) -> Candidate:
    """A server in the client's room if there is one, else any server; the lower a server's load, the likelier.

    The choice is random, because clients that choose at the same time, after a server has failed, would otherwise all
    choose the same server.
    """
    near = [candidate for candidate in candidates if room and candidate.room == room] or list(candidates)
    return random.choices(near, [1 / (1 + max(0.0, candidate.load)) for candidate in near])[0]


def chosen_by(chooser: Chooser, candidates: Sequence[Candidate], room: str) -> str:
    """The address of the candidate that the chooser returns. Raises InvalidRequest if it raises or returns another."""
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
