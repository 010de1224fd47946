"""Which server sends a schedule's messages, so that each instant is in one log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from notify.errors import Unavailable, WrongRole
from notify.protocol.keys import shard_of_key
from notify.server.schedules.schedule import Schedule
from notify.server.settings import Settings
from notify.storage.members import Member


class Place:
    """This server among those that read the same schedules.

    - Alone, it sends all.
    - Workers divide them: a schedule is at the worker of its message's key, or of its name.
    - Servers over one storage may send each of them, since that storage knows every id: one comes first, and the others
      send what it has not sent in time.
    - A server with a log of its own in a registry sends those that were declared at it: ids are known in one log only.
    """

    def __init__(
        self,
        settings: Settings,
        members: Callable[[], Sequence[Member]] | None = None,
        me: Member | None = None,
        *,
        shares_storage: bool = False,
    ) -> None:
        """`members` returns the living members of the registry, and `me` is this one; None: there is no registry."""
        self._settings = settings
        self._members = members
        self._me = me
        self.shares_storage = shares_storage

    @property
    def of_new(self) -> str:
        """The place of a schedule that is declared at this server."""
        return "" if self._members is None or self.shares_storage else self._settings.shard

    def has(self, schedule: Schedule) -> bool:
        """Whether this server may send the messages of a schedule."""
        if self._settings.key_shards:
            key = schedule.declaration.message.key
            return (
                shard_of_key(schedule.name if key is None else key, self._settings.key_shards) == self._settings.shard
            )
        return self._members is None or schedule.place == self.of_new

    def is_away(self, schedule: Schedule) -> bool:
        """Whether no living server has the log that a schedule's messages go to, as far as this server can tell."""
        if self.shares_storage or self._settings.key_shards or not schedule.place or self.has(schedule):
            return False
        members = () if self._members is None else self._members()
        shards = {shard for m in members if m.kind == "server" for shard in m.shards}
        return bool(shards) and schedule.place not in shards

    def comes_first(self, schedule: Schedule) -> bool:
        """Whether this server is the one to send them at once."""
        if not self.shares_storage or self._members is None or self._me is None:
            return True
        me = (self._me.roles, tuple(self._me.shards))
        rivals = [m.name for m in self._members() if m.kind == "server" and (m.roles, tuple(m.shards)) == me]
        return not rivals or max(rivals, key=lambda name: _weight(name, schedule.name)) == self._me.name

    def check_declares(self) -> None:
        """Raises WrongRole or Unavailable if no schedule may be declared at this server."""
        if not self._settings.takes_messages:
            raise WrongRole(
                "this server shows Kafka's groups and takes no messages: declare schedules at a server with --storage, "
                "whose messages a bridge or relay moves to Kafka"
            )
        if "transactions" not in self._settings.roles:
            raise WrongRole(
                "this server plays the queue role only: declare schedules at a server with the role transactions "
                "(`notify node list` shows it)"
            )
        twin = self._twin()
        if twin is not None:
            shard = self._settings.shard
            raise Unavailable(
                f"the log of another server in the registry ({twin.url}) is shard {shard!r}, too: it is unclear which "
                "of the two sends. Give each its own --shard; after a crash, try again in some seconds"
            )

    def _twin(self) -> Member | None:
        """A living member with another log, but with this log's name."""
        if self._members is None or self._me is None or self.shares_storage:
            return None
        me = self._me
        with_logs = (m for m in self._members() if m.kind == "server" and "queue" in m.roles)
        others = (m for m in with_logs if m.name != me.name and m.url != me.url)
        return next((m for m in others if tuple(m.shards) == tuple(me.shards)), None)


def _weight(member: str, schedule: str) -> bytes:
    return blake2b(f"{member} {schedule}".encode(), digest_size=8).digest()
