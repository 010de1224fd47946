"""The licences of installed packages, as their metadata has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

ALLOWED = re.compile(
    r"Apache|\bMIT\b|BSD|\bISC\b|PSF|Python Software Foundation|MPL|Mozilla|LGPL|Lesser General Public|Unlicense|"
    r"Public Domain|CC0|Zlib|HPND|0BSD",
    re.IGNORECASE,
)
"""Licences under which a service may use a library as it is. (LGPL: psycopg, which is imported and not changed.)"""
REFUSED = re.compile(r"\bA?GPL|Affero|(?<!Lesser )General Public|non-?commercial|proprietary|SSPL|BUSL", re.IGNORECASE)


def of(directories: Iterable[Path]) -> dict[str, str]:
    """The licence of each package in these directories, "" where it says none; without pip and setuptools."""
    known: dict[str, str] = {}
    for found in distributions(path=[str(directory) for directory in directories]):
        name = found.metadata["Name"]
        if name not in ("pip", "setuptools", "notify-tx"):
            known[f"{name} {found.version}"] = licence(found)
    return known


def licence(found: Distribution) -> str:
    """An SPDX expression where there is one; else classifiers; else the first line of the free text."""
    metadata = found.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classified = [
        text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") or () if text.startswith("License")
    ]
    text = (metadata.get("License") or "").strip().splitlines()
    return ", ".join(c for c in classified if c != "OSI Approved") or (text[0][:100] if text else "")


def is_allowed(text: str) -> bool:
    """Whether a service may use what has this licence. Of several that are joined by OR one suffices."""
    return any(ALLOWED.search(part) and not REFUSED.search(part) for part in re.split(r"\bOR\b", text))
