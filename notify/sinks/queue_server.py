"""A queue server as the sink: it keeps a source's position together with the messages before it."""

from __future__ import annotations

from typing import Any

import msgspec

from notify.client.http import HttpClient
from notify.storage.bridged import stale_epoch
from notify.wire import Bridged, PackedBridgeBatch, encode_msgpack

POST_SECONDS = 30.0


class QueueSink:
    """A queue server."""

    def __init__(self, url: str) -> None:
        self._http = HttpClient(url)
        self._epoch = 0
        """The last that this sink asked for, whether or not it learned that it got it."""

    async def claim(self, source: str, *, take_back: bool = True) -> tuple[int, str]:
        known: dict[str, Any] = msgspec.msgpack.decode(
            await self._http.call("GET", f"/v1/bridge/{source}", b"", POST_SECONDS)
        )
        epoch, position = known["epoch"] + 1, known["position"]
        if not take_back and 0 < self._epoch < known["epoch"]:
            raise stale_epoch(f"another bridge has taken source {source!r} over; stop one of the two")
        self._epoch = epoch
        claim = PackedBridgeBatch(epoch=epoch, expected_position=position, position=position, claim=True)
        await self.append(source, claim)
        return epoch, position

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        body = encode_msgpack(batch)
        answer = await self._http.call("POST", f"/v1/bridge/{source}/batches", body, POST_SECONDS)
        return msgspec.msgpack.decode(answer, type=Bridged)

    async def close(self) -> None:
        self._http.close()
