"""Withdrawals: messages that cancel or replace a delayed message, and the objects that say what became of them."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Generic, TypeVar

from notify.client.producer.sent import Named, Sent
from notify.errors import InvalidRequest, NotFound
from notify.protocol import ids
from notify.protocol.message import Message
from notify.protocol.wire import PackedMessage, WithdrawalState
from notify.protocol.withdrawal import ANY_TOPIC, CANCELS, REPLACES
from notify.runtime.backoff import Backoff

R = TypeVar("R")

OUTCOME_SECONDS = 10.0
"""How long `outcome` waits by default until it is known what became of a withdrawal."""
ASK_SECONDS, ASK_MAX_SECONDS = 0.02, 0.5


class WithdrawalOutcome(enum.StrEnum):
    """The end of a withdrawal, or how it stands."""

    WITHDRAWN = "WITHDRAWN"
    """In time: the delayed message is never delivered. A replacement is delivered in its place."""
    TOO_LATE = "TOO_LATE"
    """The message was in its queue already, or had no delay. A replacement is not delivered."""
    NOT_FOUND = "NOT_FOUND"
    """The message was rolled back or collapsed, is of another topic, or never arrived. A replacement is not
    delivered."""
    ALREADY = "ALREADY"
    """Another withdrawal of the message came first. A replacement is not delivered."""
    WAITING = "WAITING"
    """The message is undecided, or a relay has not brought it yet: the server decides when it comes."""
    UNDECIDED = "UNDECIDED"
    """The server does not know yet whether the withdrawal's own transaction is committed."""
    ROLLED_BACK = "ROLLED_BACK"
    """The withdrawal's own transaction, or its savepoint, is rolled back: nothing is withdrawn."""


OPEN = (WithdrawalOutcome.WAITING, WithdrawalOutcome.UNDECIDED)
"""The outcomes that are followed by another one."""
Target = str | Sent
"""The message to withdraw: its id, or what `send` returned."""


def cancellation(message: Target, *, topic: str | None = None, key: str | int | None = None) -> Message:
    """A message that cancels a delayed message when it is committed; send, publish or prepare it as any other.

    `topic`: the topic of the delayed message; None: that of what `send` returned, or, for an id, the topic
    `notify-withdrawals`, whose right to publish is the right to cancel in every topic. `key`: the first key of the
    transaction that sent the delayed message, which a server with several workers needs; None: that of what `send`
    returned. Raises InvalidRequest.
    """
    if isinstance(message, Sent):
        topic, key = topic or message.topic, message.place_key if key is None else key
    return Message(topic or ANY_TOPIC, b"", key=key, headers={CANCELS: _id_of(message)})


def replacement(message: Target, by: Message) -> Message:
    """A message that takes the place of a delayed message of the same topic when it is committed: one of the two is
    delivered. Its delay, if any, counts from its own commit. Raises InvalidRequest."""
    if isinstance(message, Sent) and message.topic != by.topic:
        raise InvalidRequest(
            f"a message of topic {message.topic!r} is replaced by one of the same topic, not of {by.topic!r}",
            "invalid_withdrawal",
        )
    return replace(by, headers={**by.headers, REPLACES: _id_of(message)})


def _id_of(message: Target) -> str:
    text = message.id if isinstance(message, Sent) else message
    if not isinstance(text, str):
        raise InvalidRequest(
            f"this is a {type(text).__name__}, not the id of a message: give the text, or what send returned",
            "invalid_id",
        )
    return ids.message_id(*ids.parse_message_id(text))


def check_timeout(seconds: float) -> float:
    """Raises InvalidRequest unless this is a number of seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise InvalidRequest(f"timeout is {seconds!r}; it is a number of seconds", "out_of_bounds")
    return float(seconds)


class _Asked(Sent, Generic[R]):
    """A withdrawal, and the function that asks what became of it."""

    __slots__ = ("_ask",)

    def __init__(
        self,
        pending: Named | None,
        number: int,
        packed: PackedMessage | None,
        ask: Callable[[Sent, float], R],
        message_id: str = "",
    ) -> None:
        super().__init__(pending, number, packed, message_id)
        self._ask = ask

    def _known(self) -> WithdrawalOutcome | None:
        """How the withdrawal's own transaction stands, while no server has to be asked."""
        if self._is_undone:
            return WithdrawalOutcome.ROLLED_BACK
        pending = self._pending
        if pending is None or pending.prepared:
            return None
        has_ended = pending.failed is not None or any(packed is self._packed for packed in pending.dropped)
        return WithdrawalOutcome.ROLLED_BACK if has_ended else WithdrawalOutcome.UNDECIDED


class Withdrawal(_Asked[WithdrawalOutcome]):
    """A withdrawal that was sent with a transaction, or is asked for by its id."""

    __slots__ = ()

    def outcome(self, timeout: float = OUTCOME_SECONDS) -> WithdrawalOutcome:
        """The end of the withdrawal, once its transaction is committed; waits at most `timeout` seconds until that
        is decided, and returns UNDECIDED or WAITING if it is not. Within the transaction it is UNDECIDED at once.
        Raises WrongRole if the producer's server has no queues, Forbidden, and Unavailable."""
        timeout = check_timeout(timeout)
        return self._known() or self._ask(self, timeout)


class AsyncWithdrawal(_Asked[Awaitable[WithdrawalOutcome]]):
    """A withdrawal of AsyncTransactionProducer."""

    __slots__ = ()

    async def outcome(self, timeout: float = OUTCOME_SECONDS) -> WithdrawalOutcome:
        """The end of the withdrawal; see `Withdrawal.outcome`."""
        timeout = check_timeout(timeout)
        return self._known() or await self._ask(self, timeout)


def withdrawing(sent: Sent, ask: Callable[[Sent, float], WithdrawalOutcome]) -> Withdrawal:
    """The withdrawal of what was sent."""
    return Withdrawal(sent._pending, sent._number, sent._packed, ask)


def async_withdrawing(sent: Sent, ask: Callable[[Sent, float], Awaitable[WithdrawalOutcome]]) -> AsyncWithdrawal:
    """The withdrawal of what a coroutine sent."""
    return AsyncWithdrawal(sent._pending, sent._number, sent._packed, ask)


async def outcome_of(ask: Callable[[float], Awaitable[WithdrawalState]], seconds: float) -> WithdrawalOutcome:
    """Ask until a withdrawal is decided, for `seconds` at most. `ask` is called with the seconds that are left."""
    backoff = Backoff(ASK_SECONDS, ASK_MAX_SECONDS)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        left = until - loop.time()
        try:
            outcome = WithdrawalOutcome((await ask(max(left, 1.0))).outcome)
        except NotFound as error:
            if error.code != "unknown_withdrawal":
                raise
            outcome = WithdrawalOutcome.UNDECIDED  # a relay or a bridge may not have brought it yet
        wait = backoff.next()
        if outcome not in OPEN or loop.time() + wait > until:
            return outcome
        await asyncio.sleep(wait)
