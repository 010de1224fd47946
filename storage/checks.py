"""The checks of undecided transactions: a due check, the state of a transaction's checks, and an answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

TOKEN_BITS = 62


def new_token() -> int:
    """A random token above 0, so that only the producer that was handed the check can answer it."""
    return secrets.randbits(TOKEN_BITS) + 1


@dataclass(slots=True)
class Due:
    """A check to hand to a producer now. Only an answer with its `token` counts."""

    id: bytes
    token: int
    source: str
    instance: str
    attempts: int
    topics: tuple[str, ...]
    shard: str = ""


class Checking(NamedTuple):
    """The state of an undecided transaction's checks."""

    token: int  # of the check that is under way; 0: no check is under way
    attempts: int  # answered so far
    parked: bool
    producer_group: str = ""


class CheckAnswer(NamedTuple):
    """An answer that does not decide the transaction: when to check again, and the number of answered checks."""

    id: bytes
    token: int
    next_check_us: int
    attempts: int
    park: bool = False
    shard: str | None = None
