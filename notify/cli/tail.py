"""`notify topic tail`: the newest messages of a topic, and those that come; nothing is consumed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import typer

from notify.cli.api import URL, seconds
from notify.cli.printed import is_terminal, say, say_fields, say_json
from notify.client import AsyncReader, ReceivedMessage
from notify.errors import NotFound

LOOK_SECONDS = 0.5
"""Between two looks for new messages: one request, however many queues the topic has."""
BODY_CHARACTERS = 200


def register(group: typer.Typer) -> None:
    """Add the command to the group `notify topic`."""
    group.command()(tail)


def tail(
    name: str,
    last: int = typer.Option(10, min=0, max=10_000, help="Begin with so many messages that are there already."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on with messages that come, until Ctrl-C."),
    json_lines: bool = typer.Option(False, "--json", help="Print each message as a JSON object on a line of its own."),
    url: str = URL,
) -> None:
    """Show the newest messages of a topic in the order of their commits; no group notices it."""

    async def run() -> None:
        count = 0
        async with AsyncReader(url) as reader:
            async for message in _messages(reader, name, last, follow):
                _say(message, json_lines)
                count += 1
        if not count and last:
            say(f"topic {name} has no messages", err=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


Place = tuple[str | None, int]
"""One of several logs, None where there is one, and a queue."""


async def _messages(reader: AsyncReader, topic: str, last: int, follow: bool) -> AsyncIterator[ReceivedMessage]:
    """The `last` messages of all queues together, then with `follow` those that come, without an end."""
    newest: list[ReceivedMessage] = []
    at: dict[Place, int] = {}
    for (shard, queue), (start, end) in (await _bounds(reader, topic)).items():
        at[shard, queue] = end
        async for message in reader.read(topic, queue, offset=max(start, end - last), shard=shard):
            if message.offset >= end:  # it came since: its turn is below
                break
            newest.append(message)
    newest.sort(key=lambda m: m.committed_at)
    for message in newest[len(newest) - min(last, len(newest)) :]:
        yield message
    while follow:
        for place, (start, end) in (await _bounds(reader, topic)).items():
            shard, queue = place
            begin = max(at.get(place, start), start)
            at[place] = max(begin, end)
            if end > begin:
                async for message in reader.read(topic, queue, offset=begin, shard=shard):
                    at[place] = max(at[place], message.offset + 1)
                    yield message
        await asyncio.sleep(LOOK_SECONDS)


async def _bounds(reader: AsyncReader, topic: str) -> dict[Place, tuple[int, int]]:
    """The first and the next offset of each queue. Raises NotFound where no log has the topic."""
    bounds: dict[Place, tuple[int, int]] = {}
    unknown: NotFound | None = None
    for shard in await reader.shards() or (None,):
        try:
            bounds |= {(shard, queue): ends for queue, ends in (await reader.queues(topic, shard=shard)).items()}
        except NotFound as error:
            unknown = error
    if unknown is not None and not bounds:
        raise unknown
    return bounds


def _say(message: ReceivedMessage, json_lines: bool) -> None:
    if json_lines:
        say_json(_fields(message))
        return
    place = f"{message.topic}/{message.queue}@{message.offset}"
    body = message.body.decode(errors="replace")
    shown = [place, seconds(message.committed_at), message.key or "-", body]
    if is_terminal():
        say("  ".join([*shown[:-1], body[:BODY_CHARACTERS].replace("\n", " ")]))
    else:
        say_fields(shown)


def _fields(message: ReceivedMessage) -> dict[str, Any]:
    """A message as JSON has it: the body as text, or, where it is none, in Base64."""
    known: dict[str, Any] = {
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
        return known | {"body": message.text}
    except UnicodeDecodeError:
        return known | {"body_base64": base64.b64encode(message.body).decode()}
