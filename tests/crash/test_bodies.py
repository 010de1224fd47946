"""The short form of the campaign over stored bodies, sweeps and kills."""

from __future__ import annotations

import pytest

from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER
from tests.crash import bodies


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
