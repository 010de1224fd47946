"""LargeBodies: puts the large bodies of a producer into its store, and compresses the others.

`made_small` runs within `send` and does no more than decide; what takes time (compressing a large body, its checksum,
its upload) runs in threads, just before the half or the row is written. So a transaction that rolls back before its
commit uploads nothing, and one that fails later leaves an object that `notify store sweep` deletes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future

from notify.client.bodies.stores import Stores
from notify.client.bodies.zstd import compressed, decompressed, library
from notify.errors import InvalidRequest, ObjectStoreFailed, TooLarge, TransactionRefused
from notify.protocol import ids
from notify.protocol.large_bodies import (
    ENCODING,
    FOLDER,
    PLACE,
    STORED,
    STORED_BYTES,
    ZSTD,
    Reference,
    plain_headers,
)
from notify.protocol.limits import LIMITS, check_between, check_whole
from notify.protocol.message import number_of_seconds
from notify.protocol.wire import PackedMessage
from notify.runtime import measures

STORE_ABOVE = 256 << 10
"""The default of `store_above`."""
STORE_SECONDS, STORE_MIN_SECONDS, STORE_MAX_SECONDS = 30.0, 0.1, 300.0
"""The default of `store_timeout`, and its bounds."""
USED_WITHIN_SECONDS = 600.0
"""A message is sent this soon after the upload of its body, or not at all: a sweep deletes what is older and named by
nothing. It never deletes what is younger than an hour."""


class Unsent(bytes):
    """The bytes of a reference whose body is not in the store yet, of their largest possible size. This subclass
    cannot be encoded, so that no message is sent before its body is stored."""

    data: bytes
    is_compressed: bool
    """Whether the body is to be compressed."""


def as_given(message: PackedMessage) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an encoded message whose transaction has not committed yet, as its handlers will get
    them: not compressed, and not a reference."""
    body, headers = message.body or b"", message.headers or {}
    if isinstance(body, Unsent):
        added = (PLACE, ENCODING) if body.is_compressed else (PLACE,)
        return body.data, {name: value for name, value in headers.items() if name not in added}
    if headers.get(ENCODING) == ZSTD:
        with contextlib.suppress(ValueError):  # other data, as its sender gave it
            return decompressed(body, STORED_BYTES), plain_headers(headers)
    return body, headers


class LargeBodies:
    """Belongs to one producer; for any thread."""

    def __init__(
        self, group: str, mode: str, store: str | None, store_above: int, seconds: float, compress_above: int | None
    ) -> None:
        """See TransactionProducer. Raises InvalidRequest."""
        check_whole("store_above", store_above, 0, LIMITS.message_bytes)
        self.seconds = number_of_seconds("store_timeout", seconds)
        check_between("store_timeout", self.seconds, STORE_MIN_SECONDS, STORE_MAX_SECONDS)
        if compress_above is not None:
            check_whole("compress_above", compress_above, 0, LIMITS.message_bytes)
            library()
        self._group = group
        self._folder = f"{FOLDER}/{group}/{mode}"
        self._stores = Stores([] if store is None else [store], self.seconds)
        self._url = "" if store is None else self._stores.urls[0]
        self._store_above = store_above
        self._compress_above = compress_above

    # --- within send ------------------------------------------------------------------------------------------

    def made_small(self, body: bytes, headers: dict[str, str] | None) -> tuple[bytes, dict[str, str] | None]:
        """The body and the headers to send. Raises TooLarge.

        A body that its sender compressed or stored itself, as its headers say, is not touched again in that way.
        """
        own = headers or {}
        compress = self._compress_above is not None and len(body) > self._compress_above and ENCODING not in own
        if self._url and len(body) > self._store_above and PLACE not in own:
            if len(body) > STORED_BYTES:
                raise TooLarge(f"the body has {len(body)} bytes; a store takes at most {STORED_BYTES}")
            unsent = Unsent(self._reference(len(body), "0" * 64).encoded())
            unsent.data, unsent.is_compressed = body, compress
            more = {PLACE: STORED, ENCODING: ZSTD} if compress else {PLACE: STORED}
            return unsent, own | more
        if compress and len(body) <= LIMITS.message_bytes:
            smaller = compressed(body)
            if len(smaller) < len(body):
                return smaller, own | {ENCODING: ZSTD}
        return body, headers

    def _reference(self, size: int, sha256: str) -> Reference:
        return Reference(self._url, f"{self._folder}/{ids.to_text(ids.new_id())}", size, sha256)

    # --- before the message is sent ---------------------------------------------------------------------------

    def upload(self, messages: Sequence[PackedMessage]) -> None:
        """Store the bodies that are not in the store yet; several at the same time. Returns once all are there.

        Raises ObjectStoreFailed, also after `store_timeout` seconds; InvalidRequest as `Store` does.
        """
        uploads = self._begin(messages)
        if uploads:
            concurrent.futures.wait(uploads, self.seconds, concurrent.futures.FIRST_EXCEPTION)
            self._check(uploads)

    async def upload_soon(self, messages: Sequence[PackedMessage]) -> None:
        """Like `upload`, for the event loop."""
        uploads = self._begin(messages)
        if uploads:
            waiting = [asyncio.wrap_future(upload) for upload in uploads]
            try:
                await asyncio.wait(waiting, timeout=self.seconds, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for future in waiting:
                    if not future.cancel() and not future.cancelled():
                        future.exception()  # `_check` raises the first one
            self._check(uploads)

    def _begin(self, messages: Sequence[PackedMessage]) -> list[Future[None]]:
        return [self._stores.submit(self._upload, m) for m in messages if isinstance(m.body, Unsent)]

    def _check(self, uploads: Sequence[Future[None]]) -> None:
        """Raises the error of an upload, and ObjectStoreFailed if one is not done."""
        failed: BaseException | None = None
        is_late = False
        for upload in uploads:
            outcome = "stored"
            if upload.cancelled() or not upload.done():
                upload.cancel()
                is_late, outcome = True, "late"
            elif (error := upload.exception()) is not None:
                failed, outcome = failed or error, "failed"
            measures.add(measures.UPLOADS, 1, group=self._group, outcome=outcome)
        if failed is not None:
            raise failed
        if is_late:
            raise ObjectStoreFailed(f"{self._url} did not store a body within store_timeout, {self.seconds:g} s")

    def _upload(self, message: PackedMessage) -> None:
        from notify.object_store.store import digest_of

        unsent = message.body
        assert isinstance(unsent, Unsent)
        data, headers = unsent.data, dict(message.headers or {})
        if unsent.is_compressed:
            smaller = compressed(data)
            if len(smaller) < len(data):
                data = smaller
            else:
                del headers[ENCODING]
        reference = self._reference(*digest_of(data))
        store = self._stores.of(self._url)
        assert store is not None
        began = time.monotonic()
        store.replace(reference.name, data)
        if (size := store.size(reference.name)) != len(data):
            raise ObjectStoreFailed(f"{reference.url} has {size} bytes, not the {len(data)} that were written")
        message.headers, message.body = headers, reference.encoded()
        measures.add(measures.UPLOADED, len(data), group=self._group)
        measures.add(measures.UPLOAD_SECONDS, time.monotonic() - began, group=self._group)

    def close(self) -> None:
        """End the threads."""
        self._stores.close()


class Age:
    """How old an upload is, by the clock that shows the longer time: one stops while the machine sleeps, the
    other may be set back."""

    def __init__(self) -> None:
        self._monotonic, self._wall = time.monotonic(), time.time()

    def check(self) -> None:
        """Raises TransactionRefused once the upload is too old to be relied on."""
        seconds = max(time.monotonic() - self._monotonic, time.time() - self._wall)
        if seconds > USED_WITHIN_SECONDS:
            refused = TransactionRefused(
                f"nothing is committed: {seconds:.0f} s have gone by since a body was stored, so that a sweep may "
                "have deleted it: run the transaction again",
                ObjectStoreFailed.code,
            )
            refused.retryable = True
            raise refused


def large_bodies(
    group: str, mode: str, rows: bool, store: str | None, store_above: int, seconds: float, compress_above: int | None
) -> LargeBodies | None:
    """For a producer with these options; None if it neither stores nor compresses. Raises InvalidRequest."""
    if store is None and compress_above is None:
        return None
    if store is not None and not rows:
        raise InvalidRequest(
            "store needs rows: a sweep cannot read what stands in the database's log only, and would delete its bodies"
        )
    return LargeBodies(group, mode, store, store_above, seconds, compress_above)
