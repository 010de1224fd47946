"""The roles and capabilities of each storage, as a server asks for them."""

from __future__ import annotations

from pathlib import Path

from notify.storage.capabilities import Complaining, Retaining, Sharded, Tended, shard_names
from notify.storage.log import LogStore
from notify.storage.memory import MemoryStore
from notify.storage.queues import queues_of
from notify.storage.sql.shards import SqlShards
from notify.storage.sql.store import SqlStore

CAPABILITIES = (Complaining, Retaining, Sharded, Tended)


def capabilities(store: object) -> set[type]:
    return {kind for kind in CAPABILITIES if isinstance(store, kind)}


def test_memory_plays_both_roles_and_can_nothing_else() -> None:
    store = MemoryStore()
    assert queues_of(store) is store
    assert capabilities(store) == set()


def test_the_log_plays_both_roles(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    assert queues_of(store) is store
    assert capabilities(store) == {Complaining, Retaining, Tended}
    assert shard_names(store, "main") == ("main",)


def test_a_database_keeps_transactions_only(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/storage.db", "north")
    assert queues_of(store) is None
    assert capabilities(store) == {Retaining, Sharded}
    shards = SqlShards([store])
    assert queues_of(shards) is None
    assert capabilities(shards) == {Retaining, Sharded, Tended}
    assert shard_names(shards, "main") == ("north",)
    store.engine.dispose()
