"""LeftBehind: which commits of a producer in mode auto ask the server."""

from __future__ import annotations

import os

import pytest

from notify.client.producer import left_behind
from notify.client.producer.left_behind import COMMIT_SECONDS, LeftBehind, Origin, may_be_left, means_away
from notify.errors import (
    Backpressure,
    Closed,
    DiskFull,
    Forbidden,
    NotifyError,
    StorageFailed,
    Timeout,
    TooLarge,
    Unauthorized,
    Unavailable,
    WrongRole,
)
from notify.protocol.wire import PackedMessage

HOME = Origin("public", "1")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def left(clock: Clock) -> LeftBehind:
    return LeftBehind(clock)


def of(key: str | None, topic: str = "t") -> list[PackedMessage]:
    return [PackedMessage(topic=topic, body=b"", key=key)]


@pytest.mark.parametrize(
    ("error", "is_left", "is_away"),
    [
        (Unavailable(""), True, True),
        (Timeout(""), True, True),
        (DiskFull(""), True, True),
        (StorageFailed(""), True, True),
        (Backpressure("", "rate_limited", 1.0), True, False),
        (WrongRole(""), True, False),
        (TooLarge(""), False, False),
        (Unauthorized(""), False, False),
        (Forbidden(""), False, False),
        (Closed(""), False, True),
    ],
)
def test_only_a_refusal_for_good_fails_a_commit(error: NotifyError, is_left: bool, is_away: bool) -> None:
    assert may_be_left(error) is is_left
    if is_left:
        assert means_away(error) is is_away


def test_while_the_server_is_away_every_commit_goes_by_row(left: LeftBehind) -> None:
    told: list[None] = []
    left.on_change = lambda: told.append(None)
    assert not left.holds(of("k"))
    left.away()
    left.away()
    assert left.holds(of("k")) and left.holds(of(None))
    assert (left.times_away, len(told)) == (2, 1)
    left.back(1)
    assert left.holds(of("k")), "something failed since"
    left.back(2)
    assert not left.holds(of("k"))


def test_a_key_is_held_until_its_last_transaction_is_sent(left: LeftBehind) -> None:
    left.leave("1", of("k"), HOME)
    left.leave("2", of("k"), HOME)
    left.leave("3", of(None), HOME)
    assert left.holds(of("k"))
    assert not left.holds(of("other")) and not left.holds(of(None)) and not left.holds(of("k", "another"))
    left.forget(["1"])
    assert left.holds(of("k"))
    left.forget(["2"])
    assert not left.holds(of("k"))
    assert left.ids() == ["3"]


def test_keys_that_a_look_finds_are_held_until_the_next_look(left: LeftBehind, clock: Clock) -> None:
    left.looked(frozenset({("t", "k")}), are_all=True, began=clock())
    left.meet(frozenset({("t", "met")}))
    assert left.holds(of("k")) and left.holds(of("met"))
    left.looked(frozenset(), are_all=True, began=clock())
    assert not left.holds(of("k")) and not left.holds(of("met"))


def test_a_transaction_that_never_says_that_it_ended_is_decided_after_a_while(left: LeftBehind, clock: Clock) -> None:
    left.leave("1", of("k"), HOME)
    left.leave("2", of("k"), HOME)
    left.ended("1")
    assert left.decided() == {HOME: ["1"]}
    clock.now += COMMIT_SECONDS + 1
    assert left.decided() == {HOME: ["1", "2"]}


def test_with_too_many_every_commit_with_a_key_goes_by_row_until_none_waits(
    left: LeftBehind, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_behind, "MOST_LEFT", 1)
    left.leave("1", of("k"), HOME)
    left.leave("2", of("another"), HOME)
    assert left.ids() == ["1"] and left.holds(of("third")) and not left.holds(of(None))
    left.looked(frozenset(), are_all=True, began=clock())
    assert left.holds(of("third")), "the second transaction may not have committed before that look"
    clock.now += COMMIT_SECONDS + 1
    left.looked(frozenset(), are_all=True, began=clock())
    assert not left.holds(of("third"))


def test_a_child_has_left_nothing(left: LeftBehind, monkeypatch: pytest.MonkeyPatch) -> None:
    left.leave("1", of("k"), HOME)
    left.away()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not left.holds(of("k"))
    assert left.ids() == [] and not left.is_away
