"""The SDK's reader pulls by offset: from anywhere, any number of times, and follows the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
from collections.abc import Iterator

import pytest

from notify.client import AsyncReader, Message, Reader, TransactionProducer
from notify.errors import InvalidRequest, NotFound
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import admin


@pytest.fixture
def filled(server: ServerProcess, unique: str) -> Iterator[TransactionProducer]:
    """A topic of the test's name with the messages 0 to 24; the producer that sent them."""
    with TransactionProducer(server.url, group=unique) as producer:
        for n in range(25):
            producer.publish(Message(unique, {"n": n}, key=str(n), headers={"h": "v"}))
        yield producer


def test_from_anywhere_any_number_of_times(server: ServerProcess, unique: str, filled: TransactionProducer) -> None:
    with Reader(server.url, batch=7) as reader:
        for start, first in (("earliest", 0), (0, 0), (10, 10), (25, 25), ("latest", 25)):
            read = list(reader.read(unique, offset=start))
            assert [m.json()["n"] for m in read] == [m.offset for m in read] == list(range(first, 25))
        message = next(reader.read(unique))
        assert (message.key, message.headers["h"], message.topic) == ("0", "v", unique)
        assert [m.offset for m in itertools.islice(reader.read(unique, offset=3), 2)] == [3, 4]


def test_it_follows_the_end(frozen_server: InMemoryServer, unique: str) -> None:
    path = f"/v1/topics/{unique}/queues/0/messages"
    with (
        TransactionProducer(frozen_server.url, group=unique) as producer,
        Reader(frozen_server.url) as reader,
        contextlib.closing(reader.read(unique, follow=True)) as following,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        producer.publish(Message(unique, "first"))
        reading = pool.submit(lambda: [message.text for message in itertools.islice(following, 2)])
        eventually(lambda: frozen_server.answered(path) >= 3, "the reader to ask again at the end")
        producer.publish(Message(unique, "second"))
        assert reading.result(PATIENCE_SECONDS) == ["first", "second"]


def test_an_iterator_may_outlive_its_reader(memory: InMemoryServer, unique: str) -> None:
    """Closing it, or forgetting it, raised Closed."""
    with TransactionProducer(memory.url, group=unique) as producer:
        producer.publish(Message(unique, "a"))
    with Reader(memory.url) as reader:
        following = reader.read(unique, follow=True)
        assert next(following).text == "a"
    following.close()  # type: ignore[attr-defined]


def test_an_async_reader_reads_from_an_offset(server: ServerProcess, unique: str, filled: TransactionProducer) -> None:
    async def read() -> list[int]:
        async with AsyncReader(server.url) as reader:
            return [m.json()["n"] async for m in reader.read(unique, offset=20)]

    assert asyncio.run(read()) == [20, 21, 22, 23, 24]


def test_a_reader_refuses_wrong_topics_queues_and_offsets(
    server: ServerProcess, unique: str, filled: TransactionProducer
) -> None:
    with Reader(server.url) as reader:
        for arguments in ({"topic": unique + "-none"}, {"topic": unique, "queue": 7}):
            with pytest.raises(NotFound):
                list(reader.read(**arguments))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="earliest"):
            list(reader.read(unique, offset="yesterday"))
        with pytest.raises(InvalidRequest, match="not a name"):
            list(reader.read("../topics"))
    with pytest.raises(InvalidRequest, match="batch"):
        Reader(server.url, batch=0)


def test_a_reader_learns_that_its_topic_was_made_again(memory: InMemoryServer, unique: str) -> None:
    """It got nothing until the new topic had as many messages as the old one, and skipped these
    (streamnative/kop#530, nats-io/nats-server#4174)."""

    def publish(*texts: str) -> None:
        with TransactionProducer(memory.url, group=unique) as producer:
            for text in texts:
                producer.publish(Message(unique, text))

    with Reader(memory.url) as reader:
        publish("a", "b", "c")
        assert [m.text for m in reader.read(unique)] == ["a", "b", "c"]
        admin(memory.url, "DELETE", f"topics/{unique}", {})
        publish("d", "e")
        with pytest.raises(InvalidRequest, match=r"offset 3 .* 2, .* earliest") as refused:
            list(reader.read(unique, offset=3))
        assert (refused.value.code, refused.value.status) == ("beyond_end", 410)
        assert [m.text for m in reader.read(unique, offset=1)] == ["e"] and not list(reader.read(unique, offset=2))
        with contextlib.closing(reader.read(unique, follow=True)) as following:
            assert [next(following).text, next(following).text] == ["d", "e"]
            admin(memory.url, "DELETE", f"topics/{unique}", {})
            publish("f", "g", "h")  # more than the reader has read
            with pytest.raises(InvalidRequest, match=r"made again.* earliest") as refused:
                next(following)
            assert (refused.value.code, refused.value.status) == ("beyond_end", 410)
