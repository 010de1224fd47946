"""The only thread in which a server calls Kafka's client, and the bounds on waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
from confluent_kafka import KafkaException

from notify.errors import Conflict, Forbidden, InvalidRequest, NotifyError, Unauthorized, Unavailable
from notify.kafka.brokers import translated
from notify.kafka.client_thread import ClientThread
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY
from notify.kafka.rights import of_server
from notify.server.groups.kafka.answers import CALL_SECONDS
from notify.server.groups.kafka.brokers import Brokers

T = TypeVar("T")
log = structlog.get_logger("notify.server")

ANSWER_SECONDS = 10.0
"""How long a request waits for earlier requests and for the brokers."""
AWAY_SECONDS = 3.0
"""How long requests are refused immediately, with the same reason, after the brokers did not answer."""
WRITE_SECONDS = 60.0
"""How long a request that changes something waits."""
STOP_SECONDS = 10.0
"""How long a server that stops waits for Kafka's client, which may hang."""
WAITING = 16
"""The most requests that wait; further ones are refused."""


class BrokersThread:
    """Makes blocking calls of Kafka's client one by one. Construct it on its event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self.brokers = Brokers(cluster)
        self._thread = ClientThread("notify-kafka-groups")
        self._waiting = 0
        self._is_closed = False
        self._away: NotifyError | None = None
        self._away_until = float("-inf")

    async def call(self, function: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
        """The result of a function, called in the thread. Raises its errors, and Unavailable.

        After `seconds` the request fails: a function that has not begun is not called, one that has begun runs on.
        """
        self._refuse_when_closed()
        if self._waiting >= WAITING:
            raise Unavailable(f"{WAITING} requests wait for Kafka already; try again")
        self._refuse_while_away()
        self._waiting += 1
        try:
            return await asyncio.wait_for(self._thread.call(self._ask, function), seconds)
        except TimeoutError:
            raise Unavailable(f"Kafka at {self.brokers.cluster.brokers} answers too slowly; try again") from None
        finally:
            self._waiting -= 1

    async def close(self, close_clients: Callable[[], None], seconds: float = STOP_SECONDS) -> None:
        """Close the clients by `close_clients`, after the call that runs. Calls that wait, and later ones, are refused.

        After `seconds` the clients are left to the end of the process.
        """
        self._is_closed = True
        if not await self._thread.end(close_clients, seconds):
            log.warning("kafka_client_hangs", seconds=seconds, detail="this server stops without closing its clients")

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise Unavailable("this server is stopping; ask another, or try again")

    def _refuse_while_away(self) -> None:
        if self._away is not None and time.monotonic() < self._away_until:
            raise self._away

    def _ask(self, function: Callable[[], T]) -> T:
        self._refuse_when_closed()
        self._refuse_while_away()
        try:
            return self.brokers.insist(function)
        except KafkaException as raised:
            code, error = raised.args[0].code(), self._translated(raised)
            raise (self._went_away(error) if code in AWAY else error) from raised
        except (Unauthorized, Forbidden, InvalidRequest) as refused:
            if isinstance(refused, InvalidRequest) and refused.code != "no_topic":
                raise
            raise self._went_away(Unavailable(str(refused))) from refused
        except TimeoutError:
            brokers = self.brokers.cluster.brokers
            raise self._went_away(
                Unavailable(f"Kafka at {brokers} does not answer within {CALL_SECONDS:g} s")
            ) from None

    def _translated(self, raised: KafkaException) -> NotifyError:
        """The error for the caller. A refused login or right is the server's, not the caller's: it is Unavailable."""
        error = translated(raised.args[0], self.brokers.cluster, of_server())
        if isinstance(error, Conflict):
            return Unavailable(
                "Kafka does not confirm this change: another server makes one, or it took too long; look, and try again"
            )
        return Unavailable(str(error)) if isinstance(error, Unauthorized | Forbidden) else error

    def _went_away(self, error: NotifyError) -> NotifyError:
        self._away, self._away_until = error, time.monotonic() + AWAY_SECONDS
        return error
