"""Kafka's compacted topics and commits, byte for byte: other versions read these records, and audits of later years."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

from notify.errors import InvalidRequest
from notify.kafka.control import Control, Reset
from notify.kafka.groups import FIRST_WAIT_SECONDS, RETRY_PARTITIONS, retry_partition
from notify.kafka.progress import MOST_BEGUN, MOST_CHARACTERS, MOST_FAILED, MOST_ID_CHARACTERS, MOST_SPAN, Progress

pytest.importorskip("confluent_kafka")

import msgspec

from notify.kafka import positions
from notify.kafka.control import CONTROL
from notify.kafka.redriven import DROPPED, REDRIVEN, Spot
from notify.kafka.refusals import REFUSED
from notify.kafka.subscriptions import SUBSCRIPTIONS, Place, Skipped, Subscribed
from notify.kafka.table import KafkaTable
from notify.kafka.undelivered import DECISIONS, Decision
from notify.protocol.wire import RefusedReport, RefusedTransaction

SKIPPED = Skipped(((1, 4), (6, 9)), 7, "r1")
SUBSCRIBED = Subscribed("ordered", 17, ("vip",), 'key == "a"', 20, 5, "id", (SKIPPED,))
RECORDS: list[tuple[KafkaTable[Any, Any], Any, Any, str, str]] = [
    (
        SUBSCRIPTIONS, ("points", Place("orders.placed", 3)), SUBSCRIBED,
        "706f696e74732f6f72646572732e706c616365642f33",
        "7b226d6f6465223a226f726465726564222c227374617274223a31372c2274616773223a5b22766970225d2c2266696c746572223a226b65"
        "79203d3d205c22615c22222c226174223a32302c22696e626f785f66726f6d5f7573223a352c22746f7069635f6964223a226964222c2273"
        "6b6970706564223a5b7b2272756e73223a5b5b312c345d2c5b362c395d5d2c2261745f7573223a372c227265736574223a227231227d5d7d",
    ),
    (
        SUBSCRIPTIONS, ("points", Place("orders.placed", 3)), Subscribed("shared", 0),
        "706f696e74732f6f72646572732e706c616365642f33", "7b226d6f6465223a22736861726564222c227374617274223a307d",
    ),
    (
        CONTROL, "points", Control(True, (Reset("r1", "orders.placed", "earliest"), Reset("r2", "t", 5))),
        "706f696e7473",
        "7b22706175736564223a747275652c22726573657473223a5b7b226964223a227231222c22746f706963223a226f72646572732e706c6163"
        "6564222c22746f223a226561726c69657374227d2c7b226964223a227232222c22746f706963223a2274222c22746f223a357d5d7d",
    ),
    (CONTROL, "points", Control(), "706f696e7473", "7b7d"),
    (
        DECISIONS, 17, Decision("SENT", "mended", "m.0", 12), "3137",
        "7b227374617465223a2253454e54222c22726561736f6e223a226d656e646564222c226964223a226d2e30222c22726566757365645f7573"
        "223a31327d",
    ),
    (
        REFUSED, "shop", RefusedReport(2, [RefusedTransaction("i", "t", "c", "d")]), "73686f70",
        "7b2277616974696e67223a322c227472616e73616374696f6e73223a5b7b226964223a2269222c22746f706963223a2274222c22636f6465"
        "223a2263222c2264657461696c223a2264227d5d7d",
    ),
    (REDRIVEN, ("points", Spot(3, 17)), "m.0", "706f696e74732f33403137", "6d2e30"),
    (DROPPED, ("points", Spot(3, 17)), "m.0\nann: no use", "706f696e74732f33403137", "6d2e300a616e6e3a206e6f20757365"),
]  # fmt: skip
TOPICS = ["notify-subscriptions", "notify-control", "notify-undelivered", "notify-refused", "notify-redriven",
          "notify-dropped"]  # fmt: skip


@pytest.mark.parametrize(("table", "key", "value", "key_hex", "value_hex"), RECORDS)
def test_a_row_has_these_bytes(table: KafkaTable[Any, Any], key: Any, value: Any, key_hex: str, value_hex: str) -> None:
    record = bytes.fromhex(key_hex), bytes.fromhex(value_hex)
    assert table.record(key, value) == record
    assert table.row(*record) == (key, value)


def test_the_topics_have_these_names() -> None:
    assert list(dict.fromkeys(table.topic for table, *_ in RECORDS)) == TOPICS


def test_positions_have_these_bytes() -> None:
    standing = positions.Standing(4, "p2", "p1")
    value = bytes.fromhex("7b2265706f6368223a342c22706f736974696f6e223a227032222c2273696e6365223a227031227d")
    assert msgspec.json.encode(standing) == value
    assert positions._decoded(value, positions.Standing, "shop") == standing
    assert positions._base_key("shop", 1).hex() == "73686f7020626173652031"
    part = bytes.fromhex("7b2274657874223a2274657874222c227061727473223a327d")
    assert msgspec.json.encode(positions.BasePart("text", 2)) == part
    assert tuple(each.hex() for each in positions.opening("shop")) == ("73686f70206f70656e73", "7b7d")


def test_progress_has_these_bytes() -> None:
    """The compressed bitmap is read here, and not compared: implementations of zlib write it in several ways."""
    known = bytes.fromhex(
        "7b226e6f74696679223a312c22646f6e65223a226541486a59574277414141416441424e222c226661696c6564223a5b5b312c325d5d2c22"
        "7265736574223a227231222c22626567756e223a5b315d2c226c656674223a747275652c22746f706963223a226964227d"
    )
    progress = Progress(10, frozenset({12, 13, 40}), {11: 2}, "r1", frozenset({11}), True, "id")
    assert Progress.of(10, known.decode()) == progress
    without = Progress(10, frozenset(), {11: 2}, "r1", frozenset({11}), True, "id")
    assert without.metadata().encode() == known.replace(b'"done":"eAHjYWBwAAAAdABN",', b"")


@pytest.mark.parametrize(
    ("table", "key"),
    [(SUBSCRIPTIONS, "points/t"), (SUBSCRIPTIONS, "a/t/x"), (REDRIVEN, "points/3"), (DROPPED, ""), (DECISIONS, "x")],
)
def test_another_tools_key_makes_no_row(table: KafkaTable[Any, Any], key: str) -> None:
    assert table.row(key, b"{}") is None


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_value_that_cannot_be_read_is_said(value: bytes | None) -> None:
    for table, key in ((SUBSCRIPTIONS, "points/t/0"), (DECISIONS, "1"), (REFUSED, "shop")):
        with pytest.raises(InvalidRequest, match=f"a record of {table.topic} cannot be read"):
            table.row(key, value)
    if value:
        with pytest.raises(InvalidRequest, match="notify-control"):
            CONTROL.row("points", value)
    else:
        assert CONTROL.row("points", value) == ("points", Control())


# --- A group leaves in Kafka its progress in a commit's metadata; operators leave there what they ask of it; its names


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
