"""The clients whose rates are measured: a producer of halves and outcomes, and a consumer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from notify import ids
from notify.client.http import HttpClient
from notify.errors import NotifyError
from notify.wire import (
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    Receive,
    Settle,
    SettleItem,
    encode_msgpack,
)

CALLERS = 8
BODY = b"x" * 200


def load(url: str, token: str, sent: Any, received: Any) -> None:
    """Run producers and a consumer until the process is ended; count both."""
    asyncio.run(_load(url, token, sent, received))


async def _load(url: str, token: str, sent: Any, received: Any) -> None:
    http = HttpClient(url, token=token)

    async def produce() -> None:
        while True:
            name = ids.to_text(ids.new_id())
            half = PackedTransaction(id=name, messages=[PackedMessage(topic="order", body=BODY, key="k" * 200)])
            outcome = OutcomeItem(id=name, outcome="COMMIT")
            with contextlib.suppress(NotifyError):
                request = PackedTransactions(producer_group="shop", transactions=[half])
                await http.call("POST", "/v1/transactions", encode_msgpack(request), 10)
                outcomes = Outcomes(producer_group="shop", outcomes=[outcome])
                await http.call("POST", "/v1/transactions/outcomes", encode_msgpack(outcomes), 10)
                sent.value += 1

    async def consume() -> None:
        asked = encode_msgpack(Receive(instance="points-1", topics=["order"], max=100, wait=5, lease=30))
        while True:
            with contextlib.suppress(NotifyError):
                answer = await http.call("POST", "/v1/groups/points/receive", asked, 20)
                receipts = [message["receipt"] for message in msgspec.msgpack.decode(answer)["messages"]]
                if receipts:
                    items = [SettleItem(receipt=receipt, action="ack") for receipt in receipts]
                    await http.call("POST", "/v1/groups/points/settle", encode_msgpack(Settle(items=items)), 20)
                    received.value += len(receipts)

    await asyncio.gather(*[produce() for _ in range(CALLERS)], consume())
