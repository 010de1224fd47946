"""Consumer groups, dead letters and topics for administrators, over the server's own queues or Kafka's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from notify.server.letters.engine import Change
from notify.server.letters.letters import Letters
from notify.server.watch.figures import Counted
from notify.server.watch.group_state import Watched


@dataclass(frozen=True, slots=True)
class Move:
    """A reset: where a group continues in a topic."""

    topic: str
    to: str | int
    """`earliest`, `latest`, an offset, or an instant in RFC 3339."""
    replay_effects: bool = False
    """Whether handlers with an inbox take effect again."""
    force: bool = False
    """Whether to reset although rows of the inbox may be purged."""


class Groups(Watched, Protocol):
    """The groups of one queue engine, and the sources that write into it. It returns the admin routes' answers."""

    def lag(self) -> int:
        """The number of messages that all groups together have not settled, as this server last knew it."""
        ...

    async def summary(self) -> dict[str, Any] | None:
        """The overview of all groups and their queues; None if this server has no queues."""
        ...

    async def listed(self, prefix: str, after: str, most: int) -> dict[str, Any]:
        """The groups in the order of names, with `prefix` and after the name `after`, and the number of all groups."""
        ...

    async def one(self, name: str) -> dict[str, Any]:
        """Raises NotFound."""
        ...

    async def reset(self, name: str, move: Move) -> Change:
        """Raises NotFound, InvalidRequest."""
        ...

    async def pause(self, name: str, is_paused: bool) -> Change:
        """Raises NotFound."""
        ...


class TopicViews(Protocol):
    """The topics of one queue engine for administrators."""

    async def listed(self, prefix: str, after: str, most: int, *, internal: bool = True) -> dict[str, Any]:
        """The topics in the order of names, with `prefix` and after the name `after`, and the number of all topics.

        Without `internal` the topics of dead letters and retries are left out.
        """
        ...

    async def one(self, name: str) -> dict[str, Any]:
        """Raises NotFound."""
        ...

    async def newest_at(self, names: Sequence[str]) -> dict[str, str]:
        """When the newest message of each topic was committed (RFC 3339); topics without a known time are left out."""
        ...

    async def groups_of(self, name: str) -> list[dict[str, Any]]:
        """The groups that subscribe to a topic: `group`, `mode` and `lag` of each. Raises NotFound."""
        ...

    async def senders_of(self, name: str) -> dict[str, Any]:
        """The producer groups of a topic's newest messages, `looked_at` messages since `first_at`. Raises NotFound."""
        ...


@dataclass(frozen=True, slots=True)
class QueueEngine:
    """The views of one queue engine for administrators."""

    groups: Groups
    letters: Letters[Any]
    topics: TopicViews
    counted: Counted
