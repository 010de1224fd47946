"""The checks of undecided transactions: one that is due, how they stand, and an answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

TOKEN_BITS = 62


def new_token() -> int:
    """A check's token: whoever was not handed the check cannot guess it. Above 0, which stands for none."""
    return secrets.randbits(TOKEN_BITS) + 1


@dataclass(slots=True)
class Due:
    """A check to be asked now. `token` fences its answer."""

    id: bytes
    token: int
    source: str
    instance: str
    attempts: int
    topics: tuple[str, ...]
    shard: str = ""


class Checking(NamedTuple):
    """How an undecided transaction's checks stand."""

    token: int  # of the check that is under way, 0 for none
    attempts: int  # answered so far
    parked: bool
    producer_group: str = ""


class CheckAnswer(NamedTuple):
    """An answer to a check that does not resolve it: when to ask again, and how often it has been answered by now."""

    id: bytes
    token: int
    next_check_us: int
    attempts: int
    park: bool = False
    shard: str | None = None
