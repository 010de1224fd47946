"""A storage in memory, for tests and for `notify.testing`: the contract in its plainest form, nothing survives."""

from notify.storage.memory.store import MemoryStore

__all__ = ["MemoryStore"]
