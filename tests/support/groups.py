"""Consumer groups over plain HTTP, and consumers of the SDK in threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from notify.client import AsyncConsumer, Consumer
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import admin, ask, post


class Caller:
    """One instance of a group."""

    def __init__(self, url: str, group: str, instance: str) -> None:
        self.url, self.group, self.instance = url, group, instance

    def receive(self, *topics: str, wait: float = 0, lease: float = 30, max: int = 100) -> list[dict[str, Any]]:
        """Receive once; `wait` is how long the server may wait for a first message, in seconds."""
        request = {"instance": self.instance, "topics": list(topics), "max": max, "wait": wait, "lease": lease}
        messages: list[dict[str, Any]] = post(self.url, f"/v1/groups/{self.group}/receive", request)["messages"]
        return messages

    def settle(self, messages: list[dict[str, Any]], action: str = "ack", **options: Any) -> list[int]:
        """Settle messages, and return the status of each."""
        items = [{"receipt": m["receipt"], "action": action, **options} for m in messages]
        return [item["status"] for item in post(self.url, f"/v1/groups/{self.group}/settle", {"items": items})["items"]]


def outlast_a_lease(server: InMemoryServer, group: str, lease: float) -> None:
    """Let more than a lease pass on a frozen server, whose clock moves only after the consumer has renewed it."""
    path = f"/v1/groups/{group}/settle"
    for _ in range(3):
        answered = server.answered(path)
        # The first one may have been under way when the clock moved.
        eventually(lambda n=answered: server.answered(path) >= n + 2, "two renewals")  # type: ignore[misc]
        server.advance(0.9 * lease)


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [m["body"] for m in messages]


def publish(url: str, topic: str, bodies: list[str], key: bool = False) -> None:
    """Send messages without a transaction, in one request; with `key` the first letter of each body is its key."""
    messages = [{"topic": topic, "body": body} | ({"key": body[0]} if key else {}) for body in bodies]
    items = post(url, "/v1/messages", {"messages": messages})["items"]
    assert [item["status"] for item in items] == [201] * len(bodies), items


def subscribe(url: str, group: str, topic: str, mode: str = "shared", **fields: Any) -> None:
    """Make or change a subscription; without `start` it begins with the next message."""
    admin(url, "PUT", f"groups/{group}/subscriptions/{topic}", {"mode": mode, "start": "latest", **fields})


def is_subscribed(url: str, group: str) -> bool:
    """Whether the group exists; a consumer makes it when it starts."""
    return ask(url, "GET", f"/v1/admin/groups/{group}")[0] == 200


def lag(url: str, group: str) -> int:
    """How many messages a group has not settled."""
    return sum(queue["lag"] for queue in admin(url, "GET", f"groups/{group}")["queues"])


def drain(url: str, group: str, topic: str, want: int) -> list[dict[str, Any]]:
    """Receive and acknowledge until `want` messages came, then poll once more for a surplus message.

    Fails if fewer come. A late surplus message is missed, which can make a test pass but never fail.
    """
    caller = Caller(url, group, "test")
    drained: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        missing = len(drained) < want
        batch = caller.receive(topic, wait=5 if missing else 0.3, max=1000)
        if batch:
            caller.settle(batch)
        drained += batch
        if not batch and not missing:
            return drained
        assert batch or time.monotonic() < deadline, f"waited for {want} messages of {topic}; came: {bodies(drained)}"


def die(caller: Caller, topic: str, count: int, reason: str) -> None:
    """Move so many messages to the group's dead-letter queue."""
    left = count
    while left:
        received = caller.receive(topic, wait=30, max=min(left, 1000))
        assert received, f"waited for {left} more messages of {topic}"
        assert caller.settle(received, "dead_letter", reason=reason) == [200] * len(received)
        left -= len(received)


def redrive(url: str, group: str, **body: Any) -> Any:
    """Redrive a group's dead letters. Returns the result of each, or with `all` the job's number."""
    return admin(url, "POST", f"groups/{group}/dead-letters/redrive", body)["result"]


def taken_by(consumer: Consumer | AsyncConsumer, handle: Callable[..., object]) -> Any:
    """A handler as this consumer takes it: for AsyncConsumer a coroutine that calls the function on its loop."""
    if isinstance(consumer, Consumer):
        return handle

    async def on_the_loop(given: Any, session: Any = None) -> None:
        if session is None:
            handle(given)
        else:
            await session.run_sync(lambda session: handle(given, session))

    return on_the_loop


def run(consumer: Consumer | AsyncConsumer) -> None:
    """Run a consumer of either kind, and close the connections of its inbox, which belong to its loop."""

    async def on_a_loop(consumer: AsyncConsumer) -> None:
        try:
            await consumer.run()
        finally:
            if consumer._inbox is not None:
                await consumer._inbox.engine.dispose()

    if isinstance(consumer, Consumer):
        consumer.run(signals=False)
    else:
        asyncio.run(on_a_loop(consumer))


@contextmanager
def running(*consumers: Consumer | AsyncConsumer, subscribed: bool = False) -> Iterator[None]:
    """Run consumers in threads, and stop them at the end; `subscribed` waits until their groups exist."""
    threads = [threading.Thread(target=run, args=(c,), daemon=True) for c in consumers]
    for thread in threads:
        thread.start()
    try:
        for consumer in consumers if subscribed else ():
            url, group = consumer.url, consumer.group
            eventually(lambda url=url, group=group: is_subscribed(url, group), f"the group {group}")  # type: ignore[misc]
        yield
    finally:
        for consumer in consumers:
            consumer.stop()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a consumer did not stop"
