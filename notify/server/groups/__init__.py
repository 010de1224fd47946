"""Consumer groups, dead letters and topics for administrators, over the server's own queues or Kafka's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from notify.server.jobs.letter_query import LetterQuery, Redriving
from notify.server.watch.figures import Counted
from notify.server.watch.group_state import Watched


class Change(NamedTuple):
    """A change that was checked but not made yet."""

    preview: Any
    """The change as a dry run shows it."""
    do: Callable[[], Awaitable[Any]]
    """Makes the change and returns its result."""


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


@dataclass(frozen=True, slots=True)
class Chosen:
    """The dead letters to redrive to their group."""

    ids: tuple[str, ...] | None
    """Message ids; None: letters that match `wanted`, at most `most`."""
    wanted: LetterQuery
    most: int
    replay_effects: bool = False
    force: bool = False
    offset: int = 0
    """The place where the search begins: `next_offset` of the result of an earlier call. Ids need one only over Kafka,
    which has no index of them."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter to redrive with other content."""

    id: str
    changes: Mapping[str, Any]
    """The fields to change: `body` (text) or `body_base64`, `key`, `tag`, `headers`."""
    replay_effects: bool = False
    force: bool = False


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


class Letters(Redriving, Protocol):
    """The dead letters of the groups of one queue engine. It returns the admin routes' answers."""

    async def counted(self, prefix: str, most: int) -> list[dict[str, Any]]:
        """Groups that have dead letters, with `group` and `count`, the largest count first."""
        ...

    async def failures(self, name: str) -> dict[str, Any]:
        """The failure groups of a group's letters; `looked_at` of the `of` letters were counted."""
        ...

    async def drop(self, name: str, names: tuple[str, ...], why: str, offset: int = 0) -> Change:
        """Drop the letters with these ids: they can no longer be redriven. `next_offset`: see `redrive`."""
        ...

    async def listed(self, name: str, wanted: LetterQuery, offset: int, most: int) -> dict[str, Any]:
        """The letters of a group that match, from an offset on, and the offset for the next call.

        There may be fewer than `most` although there are more: a call looks at LOOKED_AT letters at most.
        """
        ...

    async def newest(self, name: str, wanted: LetterQuery, before: int, most: int) -> dict[str, Any]:
        """The matching letters before an offset (0: the end), the newest first, and the offset for the next call (0: no
        more). There may be fewer than `most` although there are more: a call looks at LOOKED_AT letters at most.
        """
        ...

    async def redrive(self, name: str, chosen: Chosen) -> Change:
        """In preview and result, `next_offset` is where the next call goes on; 0: nowhere. Raises NotFound."""
        ...

    async def edit(self, name: str, edited: Edited) -> Change:
        """Redrive a letter with other content. Raises NotFound, Conflict, InvalidRequest if the engine cannot."""
        ...

    async def purge(self, name: str, before: str | int) -> Change:
        """Raises NotFound, InvalidRequest."""
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


@dataclass(frozen=True, slots=True)
class QueueEngine:
    """The views of one queue engine for administrators."""

    groups: Groups
    letters: Letters
    topics: TopicViews
    counted: Counted
