"""Receipts: the text that names one message of a lease, `lease.index`, or several, `lease.first-last`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from notify.errors import InvalidRequest

_RECEIPT = re.compile(r"([0-9a-f]{1,16})(?:\.([0-9]{1,9})(?:-([0-9]{1,9}))?\Z|\Z|\.)")
"""A lease's id in hexadecimal digits, and places in the lease. `int` alone would take other spellings of them."""


def lease_of(receipt: str) -> int | None:
    """The id of the lease that a receipt names; None if the text is not a receipt."""
    match = _RECEIPT.match(receipt)
    return None if match is None else int(match[1], 16)


def places_of_each(receipts: Iterable[str]) -> list[tuple[int, range] | InvalidRequest]:
    """For each receipt (the id of its lease, the places of its messages), or the error if it is not a receipt."""
    parsed: list[tuple[int, range] | InvalidRequest] = []
    for receipt in receipts:
        match = _RECEIPT.match(receipt)
        lease_id, low, high = ("", None, None) if match is None else match.groups()
        first = -1 if low is None else int(low)
        last = first if high is None else int(high)
        if not 0 <= first <= last:
            parsed.append(InvalidRequest(f"{receipt[:60]!r} is not a receipt", "invalid_receipt"))
        else:
            parsed.append((int(lease_id, 16), range(first, last + 1)))
    return parsed
