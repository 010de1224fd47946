"""The embedded log: one sequence of segment files that holds halves, outcomes, messages and progress."""

from notify.storage.log.store import LogStore

__all__ = ["LogStore"]
