"""The only thread in which a server calls Kafka's client, and the bounds on waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from confluent_kafka import KafkaException

from notify.errors import Conflict, Forbidden, InvalidRequest, NotifyError, Unauthorized, Unavailable
from notify.kafka.brokers import translated
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY
from notify.kafka.rights import of_server
from notify.server.groups.kafka.answers import CALL_SECONDS
from notify.server.groups.kafka.brokers import Brokers

T = TypeVar("T")
ANSWER_SECONDS = 10.0
"""How long a request waits for earlier requests and for the brokers."""
AWAY_SECONDS = 3.0
"""How long requests are refused immediately, with the same reason, after the brokers did not answer."""
WRITE_SECONDS = 60.0
"""How long a request that changes something waits."""
WAITING = 16
"""The most requests that wait; further ones are refused."""


class BrokersThread:
    """Blocking calls of Kafka's client, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self.brokers = Brokers(cluster)
        self._thread = ThreadPoolExecutor(1, "notify-kafka-groups")
        self._waiting = 0
        self._is_closed = False
        self._away: NotifyError | None = None
        self._away_until = float("-inf")

    async def call(self, function: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
        """The result of a function, called in the thread. Raises its errors, and Unavailable.

        After `seconds` the request fails: a function that has not begun is not called, one that has begun runs on.
        """
        if self._is_closed:
            raise Unavailable("this server is stopping; ask another, or try again")
        if self._waiting >= WAITING:
            raise Unavailable(f"{WAITING} requests wait for Kafka already; try again")
        self._refuse_while_away()
        self._waiting += 1
        try:
            future = self._thread.submit(self._ask, function)
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError:
            raise Unavailable(f"Kafka at {self.brokers.cluster.brokers} answers too slowly; try again") from None
        finally:
            self._waiting -= 1

    async def close(self, close_clients: Callable[[], None]) -> None:
        """Close the clients by `close_clients`, after the calls that wait. Later calls are refused."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, close_clients)
        self._thread.shutdown(wait=False)

    def _refuse_while_away(self) -> None:
        if self._away is not None and time.monotonic() < self._away_until:
            raise self._away

    def _ask(self, function: Callable[[], T]) -> T:
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
