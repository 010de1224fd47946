"""The one thread in which a server asks Kafka's brokers, and the bounds of how long people wait for it."""

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
"""How long a request waits, for those before it and for the brokers."""
AWAY_SECONDS = 3.0
"""So long after the brokers did not answer requests are refused at once, with the same reason."""
WRITE_SECONDS = 60.0
"""How long one that changes something waits."""
WAITING = 16
"""The most requests that wait; beyond it one is refused."""


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
        """A function's result, from the thread. Raises what it raises, and Unavailable.

        One whose request has waited too long is not begun any more; one that is under way goes on.
        """
        if self._is_closed:
            raise Unavailable("this server is stopping; ask another, or try again")
        if self._waiting >= WAITING:
            raise Unavailable(f"{WAITING} requests wait for Kafka already; try again")
        self._refuse_while_away()
        self._waiting += 1
        try:
            asked = self._thread.submit(self._ask, function)
            return await asyncio.wait_for(asyncio.wrap_future(asked), seconds)
        except TimeoutError:
            raise Unavailable(f"Kafka at {self.brokers.cluster.brokers} answers too slowly; try again") from None
        finally:
            self._waiting -= 1

    async def close(self, let_go: Callable[[], None]) -> None:
        """Let go of the clients, which `let_go` knows. Calls that wait come before; later ones are refused."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, let_go)
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
        """Login and rights that the brokers refuse are the server's own: whoever asks is let in."""
        error = translated(raised.args[0], self.brokers.cluster, of_server())
        if isinstance(error, Conflict):
            return Unavailable(
                "Kafka does not confirm this change: another server makes one, or it took too long; look, and try again"
            )
        return Unavailable(str(error)) if isinstance(error, Unauthorized | Forbidden) else error

    def _went_away(self, error: NotifyError) -> NotifyError:
        self._away, self._away_until = error, time.monotonic() + AWAY_SECONDS
        return error
