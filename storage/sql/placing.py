"""Chooses the shard of a transaction: by the key map if it has a key, otherwise by its id."""

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
    """The key map that this server follows, and how much is on its way by each version of it."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: the shards that this server knows."""
        self.names = tuple(sorted(names))
        self.key_map = KeyMap(shards=self.names)
        """The shards of keys, in order; a key's hash picks one."""
        self._sending: dict[int, int] = {}
        """How many batches are on their way by each version of the map."""
        self._confirmed: float | None = None
        """When the registry last named the valid version, in monotonic seconds; None: there is no registry."""
        self._complained = 0
        self._refusal = ""
        """Why keys are refused; empty: they are accepted."""

    def follow(self, key_map: KeyMap) -> int:
        """Follow the registry's map from now on; returns the oldest version by which something is on its way.

        A map with an unknown shard cannot be followed: then this server keeps the old map, and the change
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
        # No server sends by the new version before all have followed it. While this server has not, all
        # others send by the previous version too, which this server has.
        is_current = key_map.previous and not key_map.followed_us and self.key_map.version == key_map.version - 1
        self._refusal = "" if is_current else f"{why}; {remedy}"

    def shard_of(self, t: NewTransaction) -> str | None:
        """The shard of a transaction's first key; None: any shard.

        Raises Unavailable for a key that moves in a change of the map, and if the registry has not answered.
        """
        return self.shard_by(t, self.key_map)

    def shard_by(self, t: NewTransaction, key_map: KeyMap) -> str | None:
        """The shard of a transaction's first key, by a version of the map; None: any shard."""
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
        """Refuse keys until the registry has named the valid version."""
        self._confirmed = float("-inf")

    def is_alone(self, key_map: KeyMap) -> bool:
        """Whether this server has only one shard, so that no transaction has to be looked at."""
        if key_map.shards != self.names or key_map.previous or self._refusal:
            return False
        return self._confirmed is None or time.monotonic() - self._confirmed <= LEASE_SECONDS

    def _is_confirmed(self) -> bool:
        return self._confirmed is None or time.monotonic() - self._confirmed <= LEASE_SECONDS

    def begin(self) -> KeyMap:
        """The map to send by, noted as in use. If `follow`'s thread changes the map in between, it starts again."""
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
        """The shard of a transaction without a key: the same for the same id, while that shard answers.

        Otherwise the next shard that answers. A half that is stored twice because of this is committed on the shard
        that its producer's row names, and a queue recognises a message that was committed twice by its id.
        """
        names = self.names
        home = int.from_bytes(transaction_id[-4:]) % len(names)
        for step in range(len(names)):
            name = names[(home + step) % len(names)]
            if name in healthy:
                return name
        return names[home]
