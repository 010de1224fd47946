"""Rights: what a principal may do, and to which topics and groups. Whatever no right names is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from notify.errors import InvalidRequest
from notify.storage.names import DEAD_LETTER_PREFIX

ACTIONS = {
    "publish": "send messages to topics of this name; to dead letters only where it begins with dead-letter.",
    "check": "act as this producer group: store its halves, settle them, answer checks",
    "consume": "receive and settle as this consumer group; `GROUP@TOPIC` for some topics only",
    "read": "pull from topics of this name with offsets of one's own",
    "bridge": "append what a bridge or relay of this source has read",
    "view": "see everything the admin routes and the console show, message bodies included, and /metrics",
    "admin": "change topics and groups of this name and decide transactions of that producer group; without a name, "
    "everything, settings and tokens included",
}

MOST = 1000
"""Rights of one principal."""

_RIGHT = re.compile(r"([a-z]+)(?::([A-Za-z0-9._*-]{1,127})(?:@([A-Za-z0-9._*-]{1,127}))?)?\Z")


@dataclass(frozen=True, slots=True)
class Right:
    """One action on what matches: `publish:order.*`, `consume:points@order.*`, `view`. `*` is any run of characters."""

    action: str
    name: str = "*"
    topic: str = "*"

    def __str__(self) -> str:
        text = self.action if self.name == "*" and self.topic == "*" else f"{self.action}:{self.name}"
        return text if self.topic == "*" else f"{text}@{self.topic}"

    def covers(self, action: str, name: str, topic: str) -> bool:
        if action == "publish" and name.startswith(DEAD_LETTER_PREFIX) and not self.name.startswith(DEAD_LETTER_PREFIX):
            return False  # what is there is taken for what the group could not handle: `*` does not mean it
        return self.action == action and _matches(self.name, name) and _matches(self.topic, topic)


def parse_right(text: str) -> Right:
    """A right from its text. Raises InvalidRequest for one that does not exist."""
    found = _RIGHT.match(text)
    if found is None or found[1] not in ACTIONS:
        raise InvalidRequest(
            f"{text[:100]!r} is not a right: one of {', '.join(ACTIONS)}, then `:NAME` with * for any characters, such "
            "as publish:order.* or consume:points@order.*",
            "invalid_right",
        )
    if found[3] is not None and found[1] != "consume":
        raise InvalidRequest(f"{text[:100]!r}: only consume takes @TOPIC", "invalid_right")
    return Right(found[1], found[2] or "*", found[3] or "*")


def parse_rights(texts: Iterable[str]) -> tuple[Right, ...]:
    """Several rights. Raises InvalidRequest."""
    rights = tuple(dict.fromkeys(parse_right(text) for text in texts))
    if len(rights) > MOST:
        raise InvalidRequest(f"{len(rights)} rights; a principal has at most {MOST}", "out_of_bounds")
    return rights


def _matches(pattern: str, name: str) -> bool:
    if "*" not in pattern:
        return pattern == name
    first, *rest = pattern.split("*")
    if not name.startswith(first):
        return False
    at = len(first)
    last = rest.pop()
    for part in rest:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return name.endswith(last) and len(name) - len(last) >= at
