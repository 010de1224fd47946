"""Settling: what a consumer says of its messages, gathered into requests, and sent again while a server is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec

from notify.backoff import Backoff
from notify.client.batch import Batcher, Later
from notify.client.http import HttpClient, read_answer
from notify.errors import NotifyError
from notify.wire import Settle, SettledItem, SettledItems, SettleItem, encode_msgpack

log = logging.getLogger("notify.consumer")

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.1
RETRY_MAX_SECONDS = 5.0
_decode_settled = msgspec.msgpack.Decoder(SettledItems).decode


@dataclass(slots=True)
class _Settling:
    """A message's fate on its way to the server, which would not take it after `until` (the loop's clock)."""

    item: SettleItem
    until: float


class Settler:
    """Settles messages of a group on one server. Belongs to one event loop."""

    def __init__(self, http: HttpClient, group: str, lease: float) -> None:
        """`lease`: for how many seconds what the server does not take is sent again."""
        self._http = http
        self._path = f"/v1/groups/{group}/settle"
        self._lease = lease
        self._batcher: Batcher[_Settling, SettledItem] = Batcher(self._settle, in_flight=2)
        self._backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        """Before what the server did not take is sent again; it doubles."""

    def submit(self, item: SettleItem) -> Awaitable[SettledItem]:
        """Have an item sent; the server's answer. Raises NotifyError."""
        return self._batcher.submit(_Settling(item, asyncio.get_running_loop().time() + self._lease))

    async def _settle(self, settlings: list[_Settling]) -> list[SettledItem | Later]:
        """Tell the server. What it cannot take now is sent again until the message's lease is surely over."""
        now = asyncio.get_running_loop().time()
        body = encode_msgpack(Settle([settling.item for settling in settlings]))
        try:
            answer = await self._http.call("POST", self._path, body, CALL_SECONDS)
            answered = read_answer(_decode_settled, answer).items
        except NotifyError as error:
            if not is_away(error):
                raise
            answered = [SettledItem(s.item.receipt, error.status, error.code, str(error)) for s in settlings]
        refused = next((settled for settled in answered if _may_be_taken_later(settled)), None)
        wait = 0.0
        if refused is None:
            self._backoff.reset()
        else:
            wait = self._backoff.next()
            log.warning("the server does not settle, again in %.1f s: %s", wait, refused.detail or refused.code)
        return [
            Later(wait) if _may_be_taken_later(settled) and settling.until > now else settled
            for settling, settled in zip(settlings, answered, strict=True)
        ]


def _may_be_taken_later(settled: SettledItem) -> bool:
    return settled.status == 429 or settled.status >= 500 or settled.code == "wrong_role"


def is_away(error: NotifyError) -> bool:
    """Whether the same request may succeed later. A server without queues may learn who has them."""
    return error.retryable or error.code == "wrong_role"
