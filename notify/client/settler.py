"""Settler: sends a consumer's acks, retries and renewals in batches, and repeats them while a server is away."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from notify.client.batch import Batcher, Later
from notify.client.http import HttpClient, read_answer
from notify.errors import ForeignAnswer, NotifyError
from notify.protocol.wire import Settle, SettledItem, SettledItems, SettleItem, encode_msgpack
from notify.runtime.backoff import Backoff

log = logging.getLogger("notify.consumer")

CALL_SECONDS = 10.0
RETRY_SECONDS = 0.1
RETRY_MAX_SECONDS = 5.0
_decode_settled = msgspec.msgpack.Decoder(SettledItems).decode


@dataclass(slots=True)
class _Settling:
    """An item to settle. `until` (in the loop's time): when the message's lease ends, and repeating is pointless."""

    item: SettleItem
    until: float


class Settler:
    """Settles messages of a group on one server. Belongs to one event loop."""

    def __init__(self, http: HttpClient, group: str, lease: float) -> None:
        """`lease`: the seconds for which an item is repeated that the server does not take."""
        self._http = http
        self._path = f"/v1/groups/{group}/settle"
        self._lease = lease
        self._batcher: Batcher[_Settling, SettledItem] = Batcher(self._settle, in_flight=2)
        self._backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        """The waits before items are sent again that the server did not take."""

    def submit(self, item: SettleItem) -> asyncio.Future[SettledItem]:
        """Queue an item and return the future of the server's answer, which raises NotifyError. Raises
        Unavailable if too many items wait."""
        return self._batcher.submit(_Settling(item, asyncio.get_running_loop().time() + self._lease))

    async def _settle(self, settlings: list[_Settling]) -> list[SettledItem | Later]:
        """Settle items on the server. Items that it cannot take now are sent again until their leases have ended."""
        now = asyncio.get_running_loop().time()
        body = encode_msgpack(Settle([settling.item for settling in settlings]))
        try:
            answer = await self._http.call("POST", self._path, body, CALL_SECONDS)
            results = read_answer(_decode_settled, answer).items
        except NotifyError as error:
            if not is_away(error) or (isinstance(error, ForeignAnswer) and error.is_for_size and len(settlings) > 1):
                raise
            results = [
                SettledItem(settling.item.receipt, error.status, error.code, str(error)) for settling in settlings
            ]
        refused = next((settled for settled in results if _may_be_taken_later(settled)), None)
        wait = 0.0
        if refused is None:
            self._backoff.reset()
        else:
            wait = self._backoff.next()
            log.warning("the server does not settle, again in %.1f s: %s", wait, refused.detail or refused.code)
        return [
            Later(wait) if _may_be_taken_later(settled) and settling.until > now else settled
            for settling, settled in zip(settlings, results, strict=True)
        ]


def _may_be_taken_later(settled: SettledItem) -> bool:
    return settled.status == 429 or settled.status >= 500 or settled.code == "wrong_role"


def is_away(error: NotifyError) -> bool:
    """Whether the same request may succeed later. A server without queues may learn which server has them."""
    return error.retryable or error.code == "wrong_role"
