"""`notify topic tail`: shows the newest messages of a topic, and further ones as they come, without consuming them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import typer

from notify.admin_api.words import describe_body
from notify.cli.api import URL, place_of, seconds
from notify.cli.printed import is_terminal, say, say_fields, say_json
from notify.errors import NotFound

if TYPE_CHECKING:
    from notify.client import AsyncReader, ReceivedMessage
    from notify.client.consumer.reader import QueueBounds

LOOK_SECONDS = 0.5
"""The pause between two looks for new messages; a look is one request, however many queues the topic has."""
BODY_CHARACTERS = 200


def tail(
    name: str,
    last: int = typer.Option(10, min=0, max=10_000, help="Begin with this many existing messages."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Continue with new messages, until Ctrl-C."),
    json_lines: bool = typer.Option(False, "--json", help="Print each message as a JSON object on a separate line."),
    url: str = URL,
) -> None:
    """Show the newest messages of a topic in the order of their commits, without affecting any group."""

    from notify.client import AsyncReader

    async def run() -> None:
        count = 0
        async with AsyncReader(url) as reader:
            async for shard, message in _messages(reader, name, last, follow):
                _say(message, shard, json_lines)
                count += 1
        if not count and last:
            say(f"topic {name} has no messages", err=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


Place = tuple[str | None, int]
"""The shard (None if there is only one log) and the queue."""


async def _messages(
    reader: AsyncReader, topic: str, last: int, follow: bool
) -> AsyncIterator[tuple[str | None, ReceivedMessage]]:
    """The `last` messages of all queues together, each after its shard; with `follow`, then all new messages."""
    newest: list[tuple[str | None, ReceivedMessage]] = []
    offsets: dict[Place, int] = {}
    for place, bounds in (await _bounds(reader, topic)).items():
        offsets[place] = bounds.end
        found: list[ReceivedMessage] = []
        for start, end in reversed(bounds.spans()):
            while len(found) < last and start < end:
                begin = max(start, end - last + len(found))
                found = await _read(reader, topic, place, begin, end) + found
                end = begin
        newest += [(place[0], message) for message in found]
    newest.sort(key=lambda row: row[1].committed_at)
    for row in newest[len(newest) - min(last, len(newest)) :]:
        yield row
    while follow:
        for place, bounds in (await _bounds(reader, topic)).items():
            shard, queue = place
            begin = max(offsets.get(place, bounds.start), bounds.start)
            offsets[place] = max(begin, bounds.end)
            if bounds.end > begin:
                async for message in reader.read(topic, queue, offset=begin, shard=shard):
                    offsets[place] = max(offsets[place], message.offset + 1)
                    yield shard, message
        await asyncio.sleep(LOOK_SECONDS)


async def _read(reader: AsyncReader, topic: str, place: Place, begin: int, end: int) -> list[ReceivedMessage]:
    """The messages of a queue from one offset to before another."""
    found: list[ReceivedMessage] = []
    messages = reader.read(topic, place[1], offset=begin, shard=place[0])
    async with contextlib.aclosing(messages):
        async for message in messages:
            if message.offset >= end:
                break
            found.append(message)
    return found


async def _bounds(reader: AsyncReader, topic: str) -> dict[Place, QueueBounds]:
    """The offsets of each queue. Raises NotFound if no log has the topic."""
    bounds: dict[Place, QueueBounds] = {}
    unknown: NotFound | None = None
    for shard in await reader.shards() or (None,):
        try:
            bounds |= {(shard, queue): row for queue, row in (await reader.bounds(topic, shard=shard)).items()}
        except NotFound as error:
            unknown = error
    if unknown is not None and not bounds:
        raise unknown
    return bounds


def _say(message: ReceivedMessage, shard: str | None, json_lines: bool) -> None:
    if json_lines:
        say_json(_fields(message) | ({} if shard is None else {"shard": shard}))
        return
    place = place_of({"topic": message.topic, "queue": message.queue, "offset": message.offset, "worker": shard})
    body = describe_body(_fields(message)) or message.body.decode(errors="replace")
    columns = [place, seconds(message.committed_at), message.key or "-", body]
    if is_terminal():
        say("  ".join([*columns[:-1], body[:BODY_CHARACTERS].replace("\n", " ")]))
    else:
        say_fields(columns)


def _fields(message: ReceivedMessage) -> dict[str, Any]:
    """A message's fields for JSON; the body is text, or Base64 if it is not text."""
    fields: dict[str, Any] = {
        "id": message.id,
        "topic": message.topic,
        "queue": message.queue,
        "offset": message.offset,
        "committed_at": message.committed_at,
        "key": message.key,
        "tag": message.tag,
        "headers": dict(message.headers),
    }
    try:
        return fields | {"body": message.text}
    except UnicodeDecodeError:
        return fields | {"body_base64": base64.b64encode(message.body).decode()}
