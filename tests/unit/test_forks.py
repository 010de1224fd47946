"""A fork waits for threads that are in the middle of using the service's engine, within a bound."""

from __future__ import annotations

import threading

import pytest

from notify.client.threads import forks
from tests.support.clock import PATIENCE_SECONDS


def forking(gate: forks._Gate) -> tuple[threading.Thread, threading.Event]:
    """A thread that forks, and whether it has got that far."""
    has_forked = threading.Event()

    def fork() -> None:
        gate.close()
        has_forked.set()

    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    return thread, has_forked


def test_a_fork_waits_for_those_inside_and_those_outside_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked while a thread opened the engine's first connection waited for its lock for ever."""
    monkeypatch.setattr(forks, "FORK_SECONDS", PATIENCE_SECONDS)
    gate = forks._Gate()
    gate.enter()
    thread, has_forked = forking(gate)
    with gate._changed:
        assert gate._changed.wait_for(lambda: gate._is_forking or has_forked.is_set(), 0) or not has_forked.is_set()
    assert not has_forked.is_set()
    gate.leave()
    assert has_forked.wait(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
    entered = threading.Event()
    late = threading.Thread(target=lambda: (gate.enter(), entered.set()), daemon=True)
    late.start()
    assert not entered.is_set()
    gate.open()
    assert entered.wait(PATIENCE_SECONDS)
    late.join(PATIENCE_SECONDS)


def test_a_fork_does_not_wait_for_its_own_thread() -> None:
    gate = forks._Gate()
    gate.enter()
    gate.close()
    gate.open()
    gate.leave()


def test_a_fork_waits_no_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "FORK_SECONDS", 0.01)
    gate = forks._Gate()
    gate.enter()
    thread, has_forked = forking(gate)
    assert has_forked.wait(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
