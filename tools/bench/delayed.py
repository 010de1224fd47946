"""Sends millions of delayed messages: checks that none is early or lost, and measures how late they are."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from notify.cli.bench.consumers import ranges
from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.errors import NotifyError
from notify.protocol import ids
from notify.protocol.wire import PackedMessages, PackedPublished, Receive, Received, Settle, encode_msgpack
from notify.testing.process import ServerProcess

BATCH = 2000
TOPIC = "delayed"
GROUP = "delayed"
PATIENCE_SECONDS = 60.0
"""The longest lateness of a message and the longest time of a request; a run that reaches it ends."""
_decode = msgspec.msgpack.Decoder(Received).decode


@dataclass(slots=True)
class Arrivals:
    """The received messages. `late`: the seconds from each message's due time to its first delivery."""

    late: list[float] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    early: int = 0
    again: int = 0
    was_filled_in_time: bool = True
    """Whether all messages were sent before the first one was due; otherwise `late` includes the sending."""

    @property
    def p99(self) -> float:
        return sorted(self.late)[int(len(self.late) * 0.99)] if self.late else 0.0


async def fill(url: str, messages: int, first_due: float, span: float) -> None:
    """Send messages in random order, due evenly over `span` seconds from `first_due` on."""
    http = HttpClient(url)
    turns = iter(range(0, messages, BATCH))

    def message(n: int) -> PackedPublished:
        due = first_due + span * ((n * 7919) % messages) / messages
        body = f"{n} {due:.6f}".encode()
        deliver_at = datetime.fromtimestamp(due, UTC)
        return PackedPublished(id=ids.message_id(ids.new_id(), 0), topic=TOPIC, body=body, deliver_at=deliver_at)

    async def send() -> None:
        for first in turns:
            batch = PackedMessages(messages=[message(n) for n in range(first, min(first + BATCH, messages))])
            await http.call("POST", "/v1/messages", encode_msgpack(batch), 60)

    await asyncio.gather(*(send() for _ in range(3)))
    http.close()


async def receive(url: str, arrivals: Arrivals, all_due: float, expected: int) -> None:
    """Receive and acknowledge until all messages have arrived or no more arrive; retry while the server is down."""
    http = HttpClient(url)
    request = encode_msgpack(Receive(instance="i", max=BATCH, wait=0.5, lease=5))
    until = all_due + PATIENCE_SECONDS
    while len(arrivals.seen) < expected and time.time() < until:
        try:
            answer = await http.call("POST", f"/v1/groups/{GROUP}/receive", request, PATIENCE_SECONDS)
            messages = _decode(answer).messages
            now = time.time()
            for message in messages:
                number, due = message.body.split()
                late = now - float(due)
                arrivals.early += late < 0
                if int(number) in arrivals.seen:
                    arrivals.again += 1
                else:
                    arrivals.seen.add(int(number))
                    arrivals.late.append(late)
            if messages:
                until = max(until, now + PATIENCE_SECONDS)
                settle = encode_msgpack(Settle(ranges([message.receipt for message in messages])))
                await http.call("POST", f"/v1/groups/{GROUP}/settle", settle, PATIENCE_SECONDS)
        except NotifyError:
            await asyncio.sleep(0.05)  # the server is down: the pause between two tries
    http.close()


def run(messages: int, span: float, lead: float, kills: int) -> tuple[Arrivals, str]:
    """Send and receive messages, and kill the server `kills` times while they come due. Returns the result and a text.

    Messages come due over `span` seconds, beginning `lead` seconds from now. Raises AssertionError if a message is lost
    or early.
    """
    with tempfile.TemporaryDirectory(prefix="notify-delayed-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        arrivals = Arrivals()
        try:
            first_due = time.time() + lead

            async def whole() -> None:
                http = HttpClient(server.url)
                body = b'{"start": "earliest", "reason": "bench"}'
                path = f"/v1/admin/groups/{GROUP}/subscriptions/{TOPIC}"
                await http.call("PUT", path, body, 10, "application/json")
                http.close()
                await fill(server.url, messages, first_due, span)
                arrivals.was_filled_in_time = time.time() < first_due
                receiving = asyncio.ensure_future(receive(server.url, arrivals, first_due + span, messages))
                for n in range(kills):
                    wanted = messages * (n + 1) // (kills + 1)
                    while len(arrivals.seen) < wanted and not receiving.done():  # `receive` has a bound  # noqa: ASYNC110
                        await asyncio.sleep(0.02)  # the pause between two polls
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                await receiving

            with contextlib.closing(new_event_loop()) as loop:
                loop.run_until_complete(whole())
        finally:
            server.stop()
    lost = messages - len(arrivals.seen)
    text = (
        f"{messages:,} delayed messages due over {span:g} s, {kills} kill -9: {lost} lost, {arrivals.early} early, "
        f"p99 lateness {arrivals.p99 * 1000:.0f} ms, {arrivals.again} delivered again"
        + ("" if arrivals.was_filled_in_time else "; they were due before all were sent: the lateness means nothing")
    )
    if lost or arrivals.early:
        raise AssertionError(text)
    return arrivals, text
