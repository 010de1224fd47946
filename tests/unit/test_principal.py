"""A principal remembers its answers about rights within bounds."""

from __future__ import annotations

import sys

import pytest

from notify.errors import Forbidden
from notify.protocol.limits import NAME_CHARACTERS
from notify.server.access.principal import REMEMBERED, Principal
from notify.server.access.rights import parse_rights


def test_refused_names_are_kept_in_bounds() -> None:
    """Refused names take little memory. 40 refused polls with names of megabytes took 110 to 955 MB."""
    principal = Principal("service", parse_rights(["consume:points", "publish:order.*"]))
    for n in range(3 * REMEMBERED):
        for name in (f"{n}" + "x" * 100_000, f"{n}" + "x" * (NAME_CHARACTERS - 10)):
            assert not principal.may("consume", name)
            assert not principal.may("consume", "points", name) or len(name) <= NAME_CHARACTERS
    held = sum(sys.getsizeof(part) for asked in principal._answers for part in asked)
    assert len(principal._answers) <= REMEMBERED and held < 1 << 20
    with pytest.raises(Forbidden) as refusal:
        principal.check("check", "x" * 1_000_000)
    assert len(str(refusal.value)) < 1000
    with pytest.raises(Forbidden) as refusal:
        principal.check_some("consume", "x" * 1_000_000)
    assert len(str(refusal.value)) < 1000
    assert principal.may("consume", "points") and principal.may("publish", "order.placed")
