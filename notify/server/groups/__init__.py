"""Consumer groups as administrators see and steer them, whoever keeps their queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from notify.server.jobs.wanted import Redriving, Wanted
from notify.server.watch.figures import Counted
from notify.server.watch.group_state import Watched


class Change(NamedTuple):
    """A change that is checked and not made yet."""

    preview: Any
    """The change as a dry run shows it."""
    do: Callable[[], Awaitable[Any]]
    """Makes the change; gives its result."""


@dataclass(frozen=True, slots=True)
class Move:
    """Where a group goes on in a topic."""

    topic: str
    to: str | int
    """`earliest`, `latest`, an offset, or an instant in RFC 3339."""
    replay_effects: bool = False
    """Whether handlers with an inbox have their effects again."""
    force: bool = False
    """Although rows of the inbox may be purged."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which dead letters are sent to their group again."""

    ids: tuple[str, ...] | None
    """Message ids; None: those that are `wanted`, at most `most`."""
    wanted: Wanted
    most: int
    replay_effects: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter that is sent to its group with other content."""

    id: str
    changes: Mapping[str, Any]
    """`body` (text) or `body_base64`, `key`, `tag`, `headers`: those that are to be other than the letter's."""
    replay_effects: bool = False
    force: bool = False


class Groups(Watched, Protocol):
    """The groups of one queue engine, and who writes into it. Its answers are those of the admin routes."""

    def lag(self) -> int:
        """The messages that all groups together have not settled, as far as this server knows by now."""
        ...

    async def summary(self) -> dict[str, Any] | None:
        """The overview of all groups and their queues; None where this server has none."""
        ...

    async def listed(self, prefix: str, after: str, most: int) -> dict[str, Any]:
        """The groups by name: those that begin with `prefix` and come after `after`, and how many there are."""
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
    """The dead letters of the groups of one queue engine. Its answers are those of the admin routes."""

    async def counted(self, prefix: str, most: int) -> list[dict[str, Any]]:
        """Groups that have dead letters, those with the most first: `group` and `count` of each."""
        ...

    async def failures(self, name: str) -> dict[str, Any]:
        """The failure groups of a group's letters, and of how many letters they are: `looked_at`, and `of` in all."""
        ...

    async def drop(self, name: str, names: tuple[str, ...], why: str) -> Change:
        """Let go of letters with these ids for good."""
        ...

    async def listed(self, name: str, wanted: Wanted, offset: int, most: int) -> dict[str, Any]:
        """The letters of a group that match, from an offset on, and the offset to go on from."""
        ...

    async def newest(self, name: str, wanted: Wanted, before: int, most: int) -> dict[str, Any]:
        """The newest first: those before an offset (0: all), and the one to go on before, 0 at the end.

        Over Kafka there may be fewer than `most`, and more to go on with.
        """
        ...

    async def redrive(self, name: str, chosen: Chosen) -> Change:
        """Raises NotFound."""
        ...

    async def edit(self, name: str, edited: Edited) -> Change:
        """Send one letter with other content. Raises NotFound, Conflict, and InvalidRequest where the engine cannot."""
        ...

    async def purge(self, name: str, before: str | int) -> Change:
        """Raises NotFound, InvalidRequest."""
        ...


class TopicViews(Protocol):
    """The topics of messages of one queue engine, as administrators see them."""

    async def listed(self, prefix: str, after: str, most: int, *, internal: bool = True) -> dict[str, Any]:
        """The topics by name: those that begin with `prefix` and come after `after`, and how many there are.

        Without `internal` those of dead letters and retries are left out.
        """
        ...

    async def one(self, name: str) -> dict[str, Any]:
        """Raises NotFound."""
        ...

    async def newest_at(self, names: Sequence[str]) -> dict[str, str]:
        """When the newest message of each of these topics was committed (RFC 3339), where that is known."""
        ...

    async def groups_of(self, name: str) -> list[dict[str, Any]]:
        """The groups that subscribe to a topic: `group`, `mode` and `lag` of each. Raises NotFound."""
        ...


@dataclass(frozen=True, slots=True)
class QueueEngine:
    """One queue engine as administrators see and steer it."""

    groups: Groups
    letters: Letters
    topics: TopicViews
    counted: Counted
