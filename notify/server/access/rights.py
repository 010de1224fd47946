"""Rights: what a principal may do, and with which topics and groups. Everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from notify.errors import InvalidRequest
from notify.storage.names import DEAD_LETTER_PREFIX

ACTIONS = {
    "publish": "send messages to topics of this name; to dead-letter topics only if the name begins with dead-letter.",
    "check": "act as this producer group: store halves, send outcomes, answer checks",
    "consume": "receive and settle as this consumer group; `GROUP@TOPIC` for some topics only",
    "read": "read topics of this name at any offset",
    "bridge": "send messages as the bridge or relay of this source",
    "view": "see everything in the console, the admin routes and /metrics, message bodies included",
    "admin": "change topics and groups of this name, and decide transactions of that producer group; without a name: "
    "everything, settings and tokens included",
}

MOST = 1000
"""The most rights of one principal."""

_RIGHT = re.compile(r"([a-z]+)(?::([A-Za-z0-9._*-]{1,127})(?:@([A-Za-z0-9._*-]{1,127}))?)?\Z")


@dataclass(frozen=True, slots=True)
class Right:
    """An action and the names it is allowed for: `publish:order.*`, `consume:points@order.*`, `view`.

    `*` matches any characters.
    """

    action: str
    name: str = "*"
    topic: str = "*"

    def __str__(self) -> str:
        text = self.action if self.name == "*" and self.topic == "*" else f"{self.action}:{self.name}"
        return text if self.topic == "*" else f"{text}@{self.topic}"

    def covers(self, action: str, name: str, topic: str) -> bool:
        if action == "publish" and name.startswith(DEAD_LETTER_PREFIX) and not self.name.startswith(DEAD_LETTER_PREFIX):
            return False  # consumers of dead letters trust them: `*` does not include them
        return self.action == action and _matches(self.name, name) and _matches(self.topic, topic)


def parse_right(text: str) -> Right:
    """Parse a right. Raises InvalidRequest if the text is not a right."""
    match = _RIGHT.match(text)
    if match is None or match[1] not in ACTIONS:
        raise InvalidRequest(
            f"{text[:100]!r} is not a right: one of {', '.join(ACTIONS)}, then `:NAME` with * for any characters, such "
            "as publish:order.* or consume:points@order.*",
            "invalid_right",
        )
    if match[3] is not None and match[1] != "consume":
        raise InvalidRequest(f"{text[:100]!r}: only consume takes @TOPIC", "invalid_right")
    return Right(match[1], match[2] or "*", match[3] or "*")


def parse_rights(texts: Iterable[str]) -> tuple[Right, ...]:
    """Parse several rights, at most MOST. Raises InvalidRequest."""
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
    position = len(first)
    last = rest.pop()
    for part in rest:
        start = name.find(part, position)
        if start < 0:
            return False
        position = start + len(part)
    return name.endswith(last) and len(name) - len(last) >= position
