"""Bytes from elsewhere that no decoder takes: each reader answers with its own error, whatever msgspec raises.

For texts that are no UTF-8 and for deep nesting that is not an error of msgspec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from notify.client.transport.http import _problem, items_of
from notify.errors import DeadLetter, InvalidRequest, ObjectStoreFailed, Unavailable
from notify.kafka import control, positions, subscriptions
from notify.kafka.progress import Progress
from notify.protocol.message import ReceivedMessage
from notify.protocol.wire import UNDECODABLE
from notify.server.groups.kafka import compacted
from notify.server.groups.kafka.compacted import KEY_BYTES, CompactedTopics, News
from notify.server.groups.kafka.sources import Sources
from notify.server.json_body import decoded
from notify.storage.shipped import manifest

JSON = {
    "nothing": b"",
    "no UTF-8": b'{"%b": "\xff\xfe"}',
    "no UTF-8 outside": b"\xff\xfe",
    "depth": b'{"%b": ' + b"[" * 100_000,
    "depth in an unknown field": b'{"unknown": ' + b"[" * 100_000,
    "many digits": b'{"%b": ' + b"9" * 5000 + b"}",
    "beyond all numbers": b'{"%b": 1e999}',
    "half a pair": b'{"%b": "\\ud800"}',
    "a list": b"[]",
    "another type": b'{"%b": {}}',
}
MSGPACK = {
    "nothing": b"",
    "no UTF-8": b"\x81\xa5items\x91\x81\xa2id\xa1\xff",
    "depth": b"\x81\xa5items" + b"\x91" * 100_000,
    "depth in an unknown field": b"\x81\xa1x" + b"\x91" * 100_000,
    "a length beyond all": b"\x81\xa5items\xdd\xff\xff\xff\xff",
    "a key that is a map": b"\x81\x80\x01",
    "a time of no calendar": b"\x81\xa5items\x91\xc7\x0c\xff\x00\x00\x00\x00\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f",
}


READERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...], bytes]] = {
    "a body of an admin route": (decoded, (InvalidRequest,), b"reason"),
    "a manifest": (manifest.decoded, (ObjectStoreFailed,), b"lineage"),
    "wishes for a group": (control.Control.of, (InvalidRequest,), b"paused"),
    "a subscription": (lambda data: subscriptions.SUBSCRIPTIONS.row("g/t/0", data), (InvalidRequest,), b"mode"),
    "a position": (lambda data: positions._decoded(data, positions.Standing, "s"), (InvalidRequest,), b"position"),
    "a problem": (_problem, (), b"detail"),
    "a consumer's progress": (lambda data: Progress.of(1, data.decode("latin-1")), (), b"done"),
}


@pytest.mark.parametrize("odd", JSON)
@pytest.mark.parametrize("reader", READERS)
def test_json_that_cannot_be_decoded(reader: str, odd: str) -> None:
    read, allowed, field = READERS[reader]
    data = JSON[odd].replace(b"%b", field)
    with contextlib.suppress(*allowed):
        read(data)


def test_progress_that_another_tool_wrote_is_ignored() -> None:
    """Characters beyond ASCII in it were an error of base64 that nobody expected: the consumer did not start."""
    for done in ("é", "=", "a", "####", "QUJD"):
        assert Progress.of(7, msgspec.json.encode({"notify": 1, "done": done}).decode()) == Progress(7, is_own=False)


@pytest.mark.parametrize("odd", MSGPACK)
def test_an_answer_that_cannot_be_decoded_is_nobodys(odd: str) -> None:
    with pytest.raises(Unavailable):
        items_of(MSGPACK[odd])
    with pytest.raises(UNDECODABLE):
        msgspec.msgpack.decode(MSGPACK[odd], type=dict[str, list[dict[str, str]]])


@pytest.mark.parametrize("body", [b"[" * 100_000, b'"\xff"', b'{"a": "\xff"}', b"{", b"", b"\xff"])
def test_a_body_that_is_not_json_is_a_dead_letter(body: bytes) -> None:
    """Deep nesting was tried again until the attempts were over."""
    message = object.__new__(ReceivedMessage)
    object.__setattr__(message, "body", body)
    with pytest.raises(DeadLetter):
        message.json()
    with pytest.raises(DeadLetter):
        message.decode(dict)


def test_one_odd_record_hides_no_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of nodes could not be shown while the topic of one source had a record of another tool."""
    sound = msgspec.json.encode(positions.Standing(3, "p"))
    values = {"sound": sound, "utf8": b'{"position": "\xff"}', "deep": b'{"x": ' + b"[" * 100_000, "list": b"[]"}

    def news(_: CompactedTopics, topics: Iterable[str], **__: Any) -> Iterator[News]:
        for name, value in values.items():
            yield News(positions.positions_topic(name), name, value, 1, 0, [])

    monkeypatch.setattr(CompactedTopics, "news", news)
    sources = Sources(SimpleNamespace())  # type: ignore[arg-type]
    read = sources.read([positions.positions_topic(name) for name in values])
    assert read == {"sound": (positions.Standing(3, "p"), 1)}


def test_a_key_that_no_record_of_ours_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a mebibyte stayed in memory, one for each that somebody wrote into a topic of Notify."""
    keys = [b"g" * KEY_BYTES, b"g" * (KEY_BYTES + 1), None]

    def record(number: int, key: bytes | None) -> SimpleNamespace:
        of_topic = {"error": lambda: None, "topic": lambda: "t", "partition": lambda: 0}
        return SimpleNamespace(**of_topic, offset=lambda: number, key=lambda: key)

    written = [record(number, key) for number, key in enumerate(keys)]
    topics = CompactedTopics(SimpleNamespace(cluster=None), lambda _: None)  # type: ignore[arg-type]
    consumer = SimpleNamespace(assign=lambda _: None, unassign=lambda: None, close=lambda: None)
    monkeypatch.setattr(compacted, "reader", lambda *_: consumer)
    monkeypatch.setattr(compacted, "arrived", lambda *_: written)
    monkeypatch.setattr(compacted, "_news", lambda record: record.key())
    passed: list[Any] = list(topics._read({("t", 0): len(keys)}))
    assert passed == [keys[0], None]
