"""BodyReader: the bodies of received messages as they were sent, fetched from their store and decompressed.

A message is untrusted: it never says what is opened. Its reference has to name one of the stores that this consumer was
given, letter by letter, and an object in the folder of bodies; its size is bounded before anything is read, and its
bytes are compared with length and checksum.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence

from notify.client.bodies.stores import Stores
from notify.client.bodies.zstd import decompressed
from notify.errors import BodyUnavailable, DeadLetter, InvalidRequest
from notify.protocol.large_bodies import (
    ENCODING,
    PLACE,
    STORED_BYTES,
    ZSTD,
    Reference,
    lies_outside,
    plain_headers,
    reference_of,
)
from notify.protocol.limits import check_whole
from notify.protocol.message import ReceivedMessage
from notify.runtime import measures

BODY_BYTES = 64 << 20
"""The default of `body_bytes`."""
READ_SECONDS = 30.0
"""How long a store may give no sign of life."""

ReadMessage = ReceivedMessage | Exception
"""A message with its body, or why it cannot be read."""


class BodyReader:
    """Belongs to one consumer; for any thread."""

    def __init__(self, store: str | Sequence[str] | None, body_bytes: int) -> None:
        """`store`: the stores that may be read; `body_bytes`: the most bytes of a body. Raises InvalidRequest."""
        check_whole("body_bytes", body_bytes, 1, STORED_BYTES)
        if store is not None and not isinstance(store, str | list | tuple):
            raise InvalidRequest(f"store is a store's URL or a list of them, not a {type(store).__name__}")
        urls = [store] if isinstance(store, str) else list(store or ())
        self._stores = Stores(urls, READ_SECONDS)
        self._most = body_bytes

    def read(self, message: ReceivedMessage) -> ReceivedMessage:
        """The message with its body as it was sent. May wait for the store.

        Raises BodyUnavailable and ObjectStoreFailed, after which the message is tried again as after any error, and
        DeadLetter for what no other attempt would read.
        """
        headers = message.headers
        if not lies_outside(headers):
            return message
        body = message.body
        if PLACE in headers:
            reference = reference_of(body)
            if reference is None:
                raise DeadLetter(f"the header {PLACE} says that the body is in a store, but it is not a reference")
            body = self._counted(reference)
        if headers.get(ENCODING) == ZSTD:
            try:
                body = decompressed(body, self._most)
            except ValueError as error:
                raise DeadLetter(f"the body is compressed ({ENCODING}: {ZSTD}), and {error}") from None
            return dataclasses.replace(message, body=body, headers=plain_headers(headers))
        kept = {name: value for name, value in headers.items() if name != PLACE}
        return dataclasses.replace(message, body=body, headers=kept)

    def _counted(self, reference: Reference) -> bytes:
        began = time.monotonic()
        try:
            data = self._fetched(reference)
        except Exception as error:
            measures.add(measures.READS, 1, outcome=str(getattr(error, "code", "failed")))
            raise
        measures.add(measures.READS, 1, outcome="read")
        measures.add(measures.READ, len(data))
        measures.add(measures.READ_SECONDS, time.monotonic() - began)
        return data

    def _fetched(self, reference: Reference) -> bytes:
        from notify.object_store.store import ObjectMissing, digest_of

        store = self._stores.of(reference.store)
        if store is None:
            known = ", ".join(self._stores.urls)
            raise BodyUnavailable(
                f"the body lies in the store {reference.store!r:.200}, which this consumer may not read: "
                + (f"it was given {known}" if known else "give it store= if that store is yours")
            )
        if reference.size > self._most:
            raise DeadLetter(
                f"the body has {reference.size:,} bytes, and this consumer reads at most {self._most:,}: give it a "
                "larger body_bytes=, then redrive the message"
            )
        try:
            data = store.read(reference.name, reference.size)
        except ObjectMissing:
            is_directory = reference.store.startswith("file:")
            raise BodyUnavailable(
                f"the body {reference.url} is not in its store: something deleted it before its message, such as a "
                "lifecycle rule of the store" + (", or its disk is not mounted here" if is_directory else ""),
                "body_missing",
            ) from None
        if digest_of(data) != (reference.size, reference.sha256):
            raise BodyUnavailable(f"the body {reference.url} is not what was stored: it was altered", "body_altered")
        return data

    async def read_soon(self, message: ReceivedMessage) -> ReceivedMessage:
        """Like `read`, for the event loop."""
        return await asyncio.wrap_future(self._begin(message))

    def read_all(self, messages: Sequence[ReceivedMessage]) -> list[ReadMessage]:
        """Each message with its body, or the error that reading it raised; several are read at the same time."""
        reads = {n: self._begin(m) for n, m in enumerate(messages) if m.headers and lies_outside(m.headers)}
        if not reads:
            return list(messages)
        concurrent.futures.wait(reads.values())
        return [_result(reads[n]) if n in reads else message for n, message in enumerate(messages)]

    async def read_all_soon(self, messages: Sequence[ReceivedMessage]) -> list[ReadMessage]:
        """Like `read_all`, for the event loop."""
        reads = {n: self._begin(m) for n, m in enumerate(messages) if m.headers and lies_outside(m.headers)}
        if not reads:
            return list(messages)
        await asyncio.gather(*map(asyncio.wrap_future, reads.values()), return_exceptions=True)
        return [_result(reads[n]) if n in reads else message for n, message in enumerate(messages)]

    def _begin(self, message: ReceivedMessage) -> concurrent.futures.Future[ReceivedMessage]:
        try:
            return self._stores.submit(self.read, message)
        except RuntimeError as error:  # the system allows no thread now: the message is tried again
            failed: concurrent.futures.Future[ReceivedMessage] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """End the threads."""
        self._stores.close()


def _result(read: concurrent.futures.Future[ReceivedMessage]) -> ReadMessage:
    try:
        return read.result()
    except Exception as error:
        return error
