"""Receipts: the text that names one message of a lease, `lease.index`, or several, `lease.first-last`."""

from __future__ import annotations

from collections.abc import Iterable

from notify.errors import InvalidRequest

RECEIPT_CHARACTERS = 16
"""The most hexadecimal digits of a lease's id."""


def lease_of(receipt: str) -> int | None:
    """The id of the lease that a receipt names; None if the text is not a receipt."""
    token = receipt.partition(".")[0]
    if len(token) > RECEIPT_CHARACTERS:
        return None
    try:
        return int(token, 16)
    except ValueError:
        return None


def places_of_each(receipts: Iterable[str]) -> list[tuple[int, range] | InvalidRequest]:
    """For each receipt (the id of its lease, the places of its messages), or the error if it is not a receipt."""
    parsed: list[tuple[int, range] | InvalidRequest] = []
    for receipt in receipts:
        token, _, index = receipt.partition(".")
        try:
            if len(token) > RECEIPT_CHARACTERS:
                raise ValueError
            lease_id = int(token, 16)
            low, dash, high = index.partition("-")
            first = int(low)
            last = int(high) if dash else first
            if not 0 <= first <= last:
                raise ValueError
        except ValueError:
            parsed.append(InvalidRequest(f"{receipt[:60]!r} is not a receipt", "invalid_receipt"))
        else:
            parsed.append((lease_id, range(first, last + 1)))
    return parsed
