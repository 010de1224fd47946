"""Which shard a transaction goes to: by the key map if it has a key, by its id if it has none."""

from __future__ import annotations

import time
from collections.abc import Collection

import structlog

from notify.errors import Unavailable
from notify.protocol.keys import key_hash
from notify.storage.records import NewTransaction
from notify.storage.sql.key_map import LEASE_SECONDS, KeyMap

log = structlog.get_logger("notify.sql")


class Placing:
    """The map of keys that holds for this server, and what is on its way by which version of it."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the shards that this server knows."""
        self.names = tuple(sorted(names))
        self.key_map = KeyMap(shards=self.names)
        """The shards of keys, in order: a key's is the one that its hash picks."""
        self._sending: dict[int, int] = {}
        """How many batches are on their way that were sent by a version of the map."""
        self._confirmed: float | None = None
        """When the registry last said which version holds; None: there is no registry to ask. Monotonic seconds."""
        self._complained = 0
        self._refusal = ""
        """Why nothing with a key is taken; empty: it is."""

    def follow(self, key_map: KeyMap) -> int:
        """Go by what the registry says from now on; the oldest version by which something is on its way.

        A map with a shard that is not known here cannot be followed: then this server goes on as before, and the change
        waits for it.
        """
        unknown = [name for name in (*key_map.shards, *key_map.previous) if name not in self.names]
        if unknown:
            self._cannot_follow(key_map, unknown)
        else:
            if key_map.version != self.key_map.version:
                log.info("key_map_followed", version=key_map.version, shards=key_map.shards)
            self.key_map = key_map
            self._refusal = ""
        self._confirmed = time.monotonic()
        return min(list(self._sending), default=self.key_map.version)

    def _cannot_follow(self, key_map: KeyMap, unknown: list[str]) -> None:
        why = (
            f"version {key_map.version} of the key map has shards {', '.join(unknown)}, which this server does not know"
        )
        remedy = "start it with a --storage that names every shard of the map"
        if key_map.version != self._complained:
            self._complained = key_map.version
            log.error("key_map_not_followed", reason=why, remedy=remedy)
        # No server sends by the new version before all have followed it. As long as that waits for this server, the
        # version before it, which this server has, is what every other one sends by, too.
        is_current = key_map.previous and not key_map.followed_us and self.key_map.version == key_map.version - 1
        self._refusal = "" if is_current else f"{why}; {remedy}"

    def shard_of(self, t: NewTransaction) -> str | None:
        """Where a transaction has to go: by the first key in it; None: anywhere.

        Raises Unavailable for a key that moves in a change of the map, and where the registry has not been heard.
        """
        return self.shard_by(t, self.key_map)

    def shard_by(self, t: NewTransaction, key_map: KeyMap) -> str | None:
        """The same by another version of the map."""
        for m in t.messages:
            if m.key is not None:
                return self._shard_of_key(m.key, key_map)
        return None

    def _shard_of_key(self, key: str, now: KeyMap) -> str:
        if not self._is_confirmed():
            raise Unavailable(
                "the registry has not answered for too long, so it is unknown where keys belong; try again"
            )
        if self._refusal:
            raise Unavailable(self._refusal)
        hashed = key_hash(key)
        shard = now.shards[hashed % len(now.shards)]
        if now.previous and now.previous[hashed % len(now.previous)] != shard:
            raise Unavailable(
                f"key {key[:40]!r} moves to shard {shard!r} (version {now.version} of the key map), and waits for "
                f"{now.waits_for}; try again"
            )
        return shard

    def wait_for_map(self) -> None:
        """Take nothing with a key until the registry has said which version holds."""
        self._confirmed = float("-inf")

    def is_alone(self, key_map: KeyMap) -> bool:
        """Whether everything goes to the only shard of this server, so that no transaction has to be looked at."""
        if key_map.shards != self.names or key_map.previous or self._refusal:
            return False
        return self._confirmed is None or time.monotonic() - self._confirmed <= LEASE_SECONDS

    def _is_confirmed(self) -> bool:
        return self._confirmed is None or time.monotonic() - self._confirmed <= LEASE_SECONDS

    def begin(self) -> KeyMap:
        """The map to send by, noted as in use. Another may come from `follow`'s thread between the two: then again."""
        while True:
            key_map = self.key_map
            self._sending[key_map.version] = self._sending.get(key_map.version, 0) + 1
            if key_map is self.key_map:
                return key_map
            self.end(key_map)

    def end(self, key_map: KeyMap) -> None:
        self._sending[key_map.version] -= 1
        if not self._sending[key_map.version]:
            del self._sending[key_map.version]

    def place_of(self, transaction_id: bytes, healthy: Collection[str]) -> str:
        """Where a transaction without a key goes: the same id always to the same shard, while that answers.

        Else to the one behind it that does: a half that is stored twice by this is committed on the shard that its
        producer's row names, and a queue knows what was committed twice by its id.
        """
        names = self.names
        home = int.from_bytes(transaction_id[-4:]) % len(names)
        for step in range(len(names)):
            name = names[(home + step) % len(names)]
            if name in healthy:
                return name
        return names[home]
