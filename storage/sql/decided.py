"""Answers of several shards to the same outcomes, as one answer to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from notify.errors import NotifyError
from notify.storage.records import Decided, PartlyDecided

Answer = Decided | NotifyError
"""A shard's answer to an outcome; an error: the shard is away, or refuses."""


def one_answer_each(count: int, answers: Iterable[tuple[Sequence[int], Sequence[Answer]]]) -> list[Decided]:
    """The answer to each of `count` outcomes, of which each shard was asked some, named by their places.

    Raises PartlyDecided with the answers where one of them is an error.
    """
    best: dict[int, Answer] = {}
    for places, some in answers:
        for place, answer in zip(places, some, strict=True):
            if _says_more(answer, best.get(place)):
                best[place] = answer
    in_order = [best[place] for place in range(count)]
    decided = [answer for answer in in_order if isinstance(answer, Decided)]
    if len(decided) < count:
        raise PartlyDecided(in_order)
    return decided


def _says_more(answer: Answer, before: Answer | None) -> bool:
    """Whether an answer is worth more than another shard's: most of all that it has the transaction, and that it may
    have it more than that it has not."""
    if before is None:
        return True
    if isinstance(answer, NotifyError):
        return isinstance(before, Decided) and not before.found
    return answer.found
