"""A group leaves in Kafka its progress in a commit's metadata; operators leave there what they ask of it; its names."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from notify.errors import InvalidRequest
from notify.kafka.control import Control, Reset
from notify.kafka.groups import FIRST_WAIT_SECONDS, RETRY_PARTITIONS, retry_partition
from notify.kafka.progress import MOST_BEGUN, MOST_CHARACTERS, MOST_FAILED, MOST_ID_CHARACTERS, MOST_SPAN, Progress


def test_progress_is_read_as_it_was_written() -> None:
    for progress in (
        Progress(0),
        Progress(7, frozenset({9, 10, 4000}), {7: 3, 8: 1}, "reset-1"),
        Progress(3, begun=frozenset({3, 5}), left=True),
        Progress(3, topic="A1b2C3d4E5f6G7h8I9j0Kw"),
        Progress(9, last=(7, 5)),
        Progress(1 << 62, frozenset({(1 << 62) + 5})),
    ):
        assert Progress.of(progress.offset, progress.metadata()) == progress


def test_the_fullest_window_fits_into_a_commit() -> None:
    """Random bits are what zlib can shorten least."""
    base = 1 << 60
    for seed in range(20):
        chance = random.Random(seed)
        done = frozenset(base + n for n in range(1, MOST_SPAN) if chance.random() < 0.5)
        failed = {base + n: 1000 for n in chance.sample(range(MOST_SPAN), MOST_FAILED)}
        begun = frozenset(base + n for n in chance.sample(range(MOST_SPAN), MOST_BEGUN))
        last = (base + MOST_SPAN, (1 << 31) - 1)
        metadata = Progress(base, done, failed, "x" * MOST_ID_CHARACTERS, begun, True, "i" * 22, last).metadata()
        assert len(metadata) <= MOST_CHARACTERS and metadata.isascii()


@pytest.mark.parametrize(
    "metadata", ["", None, "another tool's", "{}", '{"notify":2}', '{"notify":1,"done":"!"}', "[1]"]
)
def test_metadata_of_another_kind_counts_as_none(metadata: str | None) -> None:
    assert Progress.of(5, metadata) == Progress(5, is_own=False)


def test_a_bitmap_that_unpacks_without_end_is_cut() -> None:
    import base64
    import zlib

    bomb = base64.b64encode(zlib.compress(b"\xff" * (50 << 20))).decode()
    assert len(Progress.of(0, f'{{"notify":1,"done":"{bomb}"}}').done) <= MOST_SPAN + 8


def test_each_doubling_of_the_wait_has_its_partition() -> None:
    assert [retry_partition(seconds) for seconds in (0, 0.1, 0.11, 0.2, 0.3, 1, 300, 3600, 40 * 86_400)] == [
        0, 0, 1, 1, 2, 4, 12, 15, 15,
    ]  # fmt: skip
    waits = [FIRST_WAIT_SECONDS * 2**n for n in range(RETRY_PARTITIONS)]
    assert [retry_partition(seconds) for seconds in waits] == list(range(RETRY_PARTITIONS))


def test_orders_to_consumers_survive_encoding() -> None:
    control = Control(
        True, (Reset("r1", "t", "earliest"), Reset("r2", "u", "2026-01-01T00:00:00Z"), Reset("r3", "v", 5))
    )
    assert Control.of(control.encoded()) == control and Control.of(None) == Control()
    assert control.reset_of("u") == control.resets[1] and control.reset_of("w") is None
    assert [reset.start() for reset in control.resets] == ["earliest", datetime(2026, 1, 1, tzinfo=UTC), 5]


@pytest.mark.parametrize("value", [b"?", b"[]", b'{"resets":[{"id":"a b","topic":"t","to":1}]}',
                                   b'{"resets":[{"id":"a","topic":"t","to":"2026-01-01"}]}'])  # fmt: skip
def test_an_order_that_no_consumer_can_obey_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Control.of(value)
