"""The short forms of the campaigns over delayed messages, over order and over turns of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER
from notify.protocol.wire import Delivered
from tests.crash import auto, bodies, fair, held, ordered, withdraw
from tools.bench import delayed


@pytest.mark.long
@pytest.mark.crash
def test_delayed_messages_over_two_kills() -> None:
    came, _ = delayed.run(6_000, span=3, lead=1, kills=2)
    assert len(came.seen) == 6_000


@pytest.mark.long
@pytest.mark.crash
def test_order_per_key_with_killed_consumers() -> None:
    ordered.run(15_000, keys=500, consumers=3, kills=6, seed=5)


@pytest.mark.crash
def test_held_keys_keep_their_order_over_skips_and_kills() -> None:
    held.run(keys=60, steps=8, consumers=3, kills=3, seed=7)


@pytest.mark.crash
def test_withdrawals_at_the_instant_of_release() -> None:
    withdraw.run(rounds=4, messages=40, seed=9)


def test_a_message_that_is_withdrawn_and_delivered_is_found() -> None:
    """The planted faults: both, neither, a replacement too many, and an answer that changes."""
    books = withdraw.Books({"m": "later"}, {"w": ("m", True)})
    books.delivered.update(["m", "w"])
    assert len(withdraw.violations_of(books, "w", "m", True, "WITHDRAWN")) == 1
    assert len(withdraw.violations_of(books, "w", "m", True, "TOO_LATE")) == 2
    assert len(withdraw.violations_of(withdraw.Books(), "w", "m", True, "WITHDRAWN")) == 1


@pytest.mark.long
@pytest.mark.crash
def test_held_keys_over_many_kills() -> None:
    held.run(keys=500, steps=20, consumers=4, kills=15, seed=8)


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize(("mode", "fair_by"), [("shared", "key"), ("ordered", "header:tenant")])
def test_tenants_take_turns_over_a_kill(mode: str, fair_by: str) -> None:
    fair.run(5_000, small=20, rounds=2, kills=1, mode=mode, fair_by=fair_by, seed=9, is_timed=False)


@pytest.mark.long
def test_without_turns_the_few_wait() -> None:
    """The planted fault: a group whose tenants take no turns."""
    with pytest.raises(AssertionError, match="the few waited more than"):
        fair.run(5_000, small=20, rounds=1, kills=0, mode="shared", fair_by="", seed=9, is_timed=False)


def test_the_campaign_of_mode_auto_finds_losses_duplicates_and_disorder() -> None:
    """The planted faults: one of each. A commit whose answer was never heard may be there."""
    assert auto.judge({"a": 3, "b": 2}, {"a": [0, 2, 1, 3], "b": [0, 0]}) == (1, 1, 1)
    assert auto.judge({"a": 2}, {"a": [0, 1, 2]}) == (0, 0, 0)


def test_a_message_that_passes_a_held_one_is_found() -> None:
    """The planted faults: a later message of a key before the end of the first, and one after its end."""
    books = held.Books({})
    for number in (0, 1):
        books.came(_delivered(f"k.{number}"))
    assert len(books.violations) == 1
    books.asked.add("k.1")
    books.came(_delivered("k.2"))
    assert len(books.violations) == 1
    books.acked.add("k.2")
    books.came(_delivered("k.2"))
    assert len(books.violations) == 2


def _delivered(body: str) -> Delivered:
    return Delivered(id="x", topic="t", queue=0, offset=0, committed_at="", body=body.encode())


def test_an_inversion_is_found(tmp_path: Path) -> None:
    """The planted fault: the second message of a key before the first one's ack."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text('[1, [["r", "k", 0]]]\n[2, [["a", "k", 0]]]\n[3, [["r", "k", 1]]]\n[4, [["r", "k", 1]]]\n[5, ')
    assert ordered.inversions([good]) == (0, 2)
    bad.write_text('[1, [["r", "k", 0]]]\n[2, [["r", "k", 1]]]\n')
    assert ordered.inversions([bad]) == (1, 2)


# --- the short form of the campaign over stored bodies, sweeps and kills --------------------------------------------


@pytest.mark.long
@pytest.mark.crash
def test_no_message_loses_its_body_to_a_sweep() -> None:
    _, wrong = bodies.run(60, seed=1)
    assert wrong == []


@pytest.mark.long
@pytest.mark.crash
def test_no_message_in_kafka_loses_its_body_to_a_sweep() -> None:
    pytest.importorskip("confluent_kafka")
    _, wrong = bodies.run(60, seed=3, over_kafka=True)
    assert wrong == []


@pytest.mark.long
@pytest.mark.crash
def test_a_body_that_is_missing_is_found() -> None:
    """The planted fault: bodies of messages that are still in the log are deleted."""

    def harm(place: bodies.Place) -> None:
        store = Store(place.store)
        named = bodies.once(place)["named"]
        assert named
        for name in store.names(FOLDER)[::2]:
            store.delete(name)

    _, wrong = bodies.run(8, seed=2, look=harm)
    assert any("could not be read" in text for text in wrong)
