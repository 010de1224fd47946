"""Delayed records: what is one, and what is not, whoever wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from notify.kafka.records import DUE, TARGET
from notify.movers.sinks.delays.delayed_record import delayed_headers, delayed_of


class Record:
    def __init__(self, headers: Any) -> None:
        self._headers = headers

    def headers(self) -> Any:
        return self._headers

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"


def test_a_delayed_record_says_when_and_where() -> None:
    delayed = delayed_of(Record([("own", b"1"), *delayed_headers([], 12, "orders")]))
    assert delayed is not None
    assert (delayed.topic, delayed.due_us, delayed.headers) == ("orders", 12, [("own", b"1")])


@pytest.mark.parametrize("due", [b"x", b"-1", b"9" * 400, "²".encode(), None])
def test_a_record_whose_time_is_none_is_left_out(due: bytes | None) -> None:
    assert delayed_of(Record([(DUE, due), (TARGET, b"orders")])) is None


def test_a_record_whose_topic_is_no_text_is_left_out() -> None:
    """It ended the releaser of its slot, and then the next one's."""
    assert delayed_of(Record([(DUE, b"12"), (TARGET, b"\xff")])) is None
