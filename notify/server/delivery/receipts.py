"""Receipts: the text that stands for messages of a lease, `lease.index` or, of several, `lease.first-last`."""

from __future__ import annotations

from collections.abc import Iterable

from notify.errors import InvalidRequest

RECEIPT_CHARACTERS = 16
"""A lease has so many hexadecimal digits at most."""


def lease_of(receipt: str) -> int | None:
    """The lease that a receipt names; None where it is no receipt."""
    token = receipt.partition(".")[0]
    if len(token) > RECEIPT_CHARACTERS:
        return None
    try:
        return int(token, 16)
    except ValueError:
        return None


def places_of_each(receipts: Iterable[str]) -> list[tuple[int, range] | InvalidRequest]:
    """For each receipt the lease that it names and the places of its messages; the error for what is no receipt."""
    named: list[tuple[int, range] | InvalidRequest] = []
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
            named.append(InvalidRequest(f"{receipt[:60]!r} is not a receipt", "invalid_receipt"))
        else:
            named.append((lease_id, range(first, last + 1)))
    return named
