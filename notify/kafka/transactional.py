"""A transactional producer that begins a transaction only if all earlier ones are over at the brokers, too.

It works around four faults of Kafka's client, librdkafka 2.16.

First, a request of one transaction may change a later one. If a connection breaks, the client sends its requests again,
and succeeds, while the first copies are still on their way. All transactions of a producer have the same epoch, since
the client does not send EndTxn version 5 (KIP-890), so that a broker cannot tell that a copy is late: a commit or an
abort ends the next transaction halfway, and offsets replace newer ones. So a producer is spent once a request of a
transaction has no answer, or if it is unknown whether it has one.

Second, the client may lose a record. A broker stores a record of a transaction, but its answer gets lost, and the
transaction is aborted while the record waits to be sent again. The client then gives the record's sequence number to
the next record for that partition. The broker regards that record as a repetition of the first and answers that it is
stored, although the stored one belongs to the aborted transaction. So a producer whose records may have been stored
without an answer is spent, too.

A producer that is spent begins no other transaction. A new producer with the same transactional id has another epoch:
brokers refuse what arrives late from the earlier one, and sequence numbers begin again.

Third, after brokers had died the client waited for minutes in `send_offsets_to_transaction`, without a bound. Here
calls end in time.

Fourth, while it aborts a transaction, the client may wait for a record that it does not send: it empties its queue
once, and a record whose connection breaks after that is put into the queue again. Here each call empties it again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from notify.kafka.calls import Hangs, within
from notify.kafka.codes import NEVER_STORED
from notify.kafka.exchange import Exchange
from notify.kafka.quotas import QUOTAS
from notify.runtime.program_log import program_log

log = program_log("notify.kafka")
OnDelivery = Callable[[KafkaError | None, Any], None]
T = TypeVar("T")

MORE_SECONDS = 10.0
"""How long after its time-out a call of the client may still end before it counts as hanging."""


ABORT_SECONDS = 2.0
"""The time-out of one attempt to abort a transaction."""

STEP_SECONDS = 0.25
"""How long `flush` waits between two looks at what the brokers refused."""
DRAIN_SECONDS = 60.0
"""How often what idle clients log is taken: it waits in memory, without a bound."""


class TransactionalProducer:
    """Kafka's producer. After a call has hung, each later call fails immediately, and the caller makes a new producer.

    A new producer with the same transactional id ends the open transaction of the hanging one.
    """

    def __init__(self, producer: Producer, exchange: Exchange) -> None:
        """`exchange`: the logger of this producer."""
        self._producer = producer
        self._exchange = exchange
        self._hangs = False
        self._is_idle = True
        """Whether no transaction is open."""
        self._polling = threading.Lock()
        self.is_spent = False
        """Something of an earlier transaction may still be on its way, or was stored without an answer: from now on
        `begin_transaction` fails."""
        _drained.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def init_transactions(self, seconds: float) -> None:
        """The client's method. Raises KafkaException, with _TIMED_OUT if the call hangs."""
        self._within(seconds, self._producer.init_transactions)
        self.poll(0)
        if not self._exchange.tells:
            log.error("Kafka's client does not log its requests: each transaction needs a new one, which takes long")

    def begin_transaction(self) -> None:
        """The client's method. Also raises KafkaException if the producer is spent: then the caller makes a new one."""
        if self.is_spent:
            raise KafkaException(
                KafkaError(KafkaError._STATE, "the last transaction of the client may not be over: a new one is made")
            )
        with self._polling:
            self._is_idle = False
        self.poll(0)
        self._exchange.begin()
        _called(self._producer.begin_transaction)

    def produce(self, *args: Any, on_delivery: OnDelivery | None = None, **kwargs: Any) -> None:
        """The client's method."""

        def answered(error: KafkaError | None, record: Any) -> None:
            if error is not None and error.code() not in NEVER_STORED:
                self.is_spent = True
            if on_delivery is not None:
                on_delivery(error, record)

        _called(partial(self._producer.produce, *args, **kwargs, on_delivery=answered))  # type: ignore[misc]

    def flush(self, seconds: float) -> int:
        """The client's method: how many records are left. Raises KafkaException for a fatal error."""
        return _called(partial(self._producer.flush, seconds))

    def poll(self, seconds: float) -> int:
        """The client's method, which takes what the client has logged, and its answers. Raises as `flush` does."""
        return _called(partial(self._producer.poll, seconds))

    def send_offsets_to_transaction(self, positions: list[Any], group: Any, seconds: float) -> None:
        """The client's method, bounded like `init_transactions`."""
        self._within(seconds, partial(self._producer.send_offsets_to_transaction, positions, group))

    def commit_transaction(self, seconds: float) -> None:
        """The client's method, bounded like `init_transactions`. If it hangs, the outcome is unknown."""
        self._within(seconds, self._producer.commit_transaction)
        self._ended()

    def abort_transaction(self, seconds: float) -> None:
        """The client's method, bounded like `init_transactions`."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > ABORT_SECONDS:
            try:
                self._within(ABORT_SECONDS, self._producer.abort_transaction)
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
            else:
                return self._ended()
        self._within(max(0.0, remaining), self._producer.abort_transaction)
        self._ended()

    def _ended(self) -> None:
        """Find out whether the transaction that the client has ended is over at the brokers, too."""
        try:
            self.poll(0)  # the client has logged its last answer before it returned
        except (KafkaException, SystemError) as raised:  # the transaction has ended nevertheless
            log.debug("Kafka's client failed after a transaction: %s", raised)
            self.is_spent = True
        if not self._exchange.is_over:
            log.info("a request in a transaction had no answer at first: Kafka's client is replaced")
            self.is_spent = True
        self._is_idle = True

    def drain(self) -> None:
        """Take what the client has logged while it was idle."""
        with self._polling, contextlib.suppress(KafkaException, SystemError):  # the next call raises it again
            if self._is_idle and not self._hangs:
                self.poll(0)

    def _within(self, seconds: float, call: Callable[[float], None]) -> None:
        if self._hangs:
            raise _hanging()
        try:
            within(seconds, partial(_called, partial(call, seconds)), MORE_SECONDS)
        except Hangs:
            self._hangs = True
            log.warning("Kafka's client does not end a call within %g s, and is left to itself", seconds + MORE_SECONDS)
            raise _hanging() from None


def flush(
    producer: Producer | TransactionalProducer,
    is_refused: Callable[[], object],
    seconds: float,
    latest: Callable[[], float] = lambda: float("-inf"),
) -> None:
    """Wait until the brokers have answered all records. `is_refused`: whether they refused any. `latest`: until when,
    by the monotonic clock, to wait for brokers that do not read because of a quota.

    After a refusal the transaction can only be aborted, and the client sends no more of its records. So this waits only
    for the records sent with the refused one, whose answers arrive together. Raises KafkaException (_TIMED_OUT) if
    answers are missing after `seconds`, and after `latest` if brokers read nothing because of a quota until then.
    """
    began = time.monotonic()
    while (missing := producer.flush(min(STEP_SECONDS, seconds))) and not is_refused():
        now = time.monotonic()
        if now >= max(began + seconds, min(QUOTAS.until + seconds, latest())):
            why = f"{missing} records have no answer after {now - began:.0f} s{QUOTAS.why_silent()}"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, why, txn_requires_abort=True))
    if is_refused():
        producer.flush(STEP_SECONDS)


def _called(call: Callable[[], T]) -> T:
    """Make a call of the client. Raises KafkaException for a fatal error that the client found within a callback.

    It reports such an error as the cause of a SystemError; or, if it called its logger after it had found it, it raises
    the KafkaError itself, which is not a Python Exception: it would end a thread whose caller waits for the result.
    """
    try:
        return call()
    except SystemError as raised:
        if isinstance(raised.__cause__, KafkaException):
            raise raised.__cause__ from None
        raise
    except BaseException:
        raise
    except:  # noqa: E722 - nothing else catches it
        error = sys.exc_info()[1]
    raise KafkaException(error)


class _Drained:
    """The producers of this process, which one thread drains."""

    def __init__(self) -> None:
        self._producers: weakref.WeakSet[TransactionalProducer] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._is_running = False

    def add(self, producer: TransactionalProducer) -> None:
        with self._changing:
            self._producers.add(producer)
            if not self._is_running:
                threading.Thread(target=self._run, name="notify-kafka-drain", daemon=True).start()
            self._is_running = True

    def _run(self) -> None:
        while True:
            time.sleep(DRAIN_SECONDS)
            with self._changing:
                producers = list(self._producers)
            while producers:  # this thread keeps no producer
                producers.pop().drain()


def _hanging() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, "Kafka's client hangs in a transaction"))


_drained = _Drained()
