"""Targets of relays and bridges, each with a topic of one test: queue servers and Kafka."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from notify.testing.process import ServerProcess
from tests.support.groups import bodies, drain, subscribe
from tests.support.kafka import KafkaNode, committed
from tests.support.kafka_proxy import Api, Fault, Which
from tests.support.proxy import Proxy


class Target(Protocol):
    """One kind of target, and a topic of this test."""

    url: str
    topic: str

    def delivered(self, count: int) -> list[str]:
        """The bodies of all messages that consumers see, queue by queue; waits until there are so many."""
        ...

    def proxied(self) -> str:
        """The URL by which `cut` can cut connections."""
        ...

    def cut(self, *, answer: bool) -> Callable[[], bool]:
        """Cut the connection when the next batch is stored, before or after the target has done it; whether it was."""
        ...


class QueueServer:
    """A queue server."""

    def __init__(self, server: ServerProcess, topic: str) -> None:
        self.url, self.topic = server.url, topic
        self._proxy: Proxy | None = None
        subscribe(self.url, topic, topic)

    def delivered(self, count: int) -> list[str]:
        return bodies(drain(self.url, self.topic, self.topic, count))

    def proxied(self) -> str:
        host, port = self.url.removeprefix("http://").split(":")
        self._proxy = Proxy(host, int(port))
        return f"http://127.0.0.1:{self._proxy.port}"

    def cut(self, *, answer: bool) -> Callable[[], bool]:
        assert self._proxy is not None
        proxy = self._proxy
        proxy.cut_at(b"second of two", answer=answer)
        return lambda: proxy.cuts == 1

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()


class Kafka:
    """A Kafka node, which is behind a proxy."""

    def __init__(self, node: KafkaNode, topic: str) -> None:
        self.url, self.topic = f"{node.url}?notify.partitions=1", topic
        self._proxy = node.proxy

    def delivered(self, count: int) -> list[str]:
        return [record.value().decode() for record in committed(self.url, self.topic, count)]

    def proxied(self) -> str:
        return self.url

    def cut(self, *, answer: bool) -> Callable[[], bool]:
        cut = self._proxy.plan(Which(Api.END_TXN), Fault.CUT_AFTER if answer else Fault.CUT_BEFORE)
        return lambda: cut.has_hit

    def close(self) -> None:
        """The node continues."""
