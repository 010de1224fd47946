"""Makes Kafka's clients for a URL with the brokers' addresses and client settings, such as those of TLS and SASL."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, cast

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from notify.errors import InvalidRequest
from notify.kafka.exchange import Exchange
from notify.kafka.quotas import QUOTAS
from notify.kafka.records import SCHEME
from notify.kafka.transactional import TransactionalProducer
from notify.protocol.limits import digits
from notify.runtime.environment import text_of
from notify.runtime.program_log import program_log
from notify.runtime.urls import without_secrets

T = TypeVar("T")
log = program_log("notify.kafka")

SETTINGS_FILE = "NOTIFY_KAFKA_SETTINGS"
"""The environment variable with the path of a file of client settings, with lines `name=value` as in Kafka's files."""
_BROKERS = "the brokers are those before the ? of the URL"
_ONCE = "each message is in Kafka once, and on the disks of all replicas that are in sync"
_DONE = "a group's position follows its finished handlers, and a new group begins at its subscription's start"
_MEMBERS = "a consumer's mode determines how its instances share the partitions"
OWN_SETTINGS: Mapping[str, str] = {
    "bootstrap.servers": _BROKERS, "metadata.broker.list": _BROKERS,
    "transactional.id": _ONCE, "enable.idempotence": _ONCE, "acks": _ONCE, "request.required.acks": _ONCE,
    "transaction.timeout.ms": "readers wait only a bounded time for a process that died within a transaction",
    "isolation.level": "messages of rolled-back transactions are not read",
    "enable.auto.commit": _DONE, "auto.commit.enable": _DONE, "enable.auto.offset.store": _DONE,
    "auto.offset.reset": _DONE, "enable.partition.eof": _DONE,
    "group.id": _MEMBERS, "group.instance.id": _MEMBERS, "partition.assignment.strategy": _MEMBERS,
    "group.protocol": _MEMBERS, "group.remote.assignor": _MEMBERS,
}  # fmt: skip
"""Settings that Notify's guarantees depend on, each with its guarantee: Notify sets them itself."""
ALIASES = {"queue.buffering.max.ms": "linger.ms", "compression.codec": "compression.type"}
"""The client's other names for settings that Notify sets."""
REFUSED_SETTINGS = "kafka_settings"
"""The code of an error about settings that Kafka's client refuses, perhaps while their file is being replaced."""
MOST_BYTES = 1_000_000_000
"""The client's own bound for a record, set to its maximum: brokers and topics have smaller bounds."""
PARTITIONS, MOST_PARTITIONS = "notify.partitions", 10_000
"""A setting of Notify, not of the client: the number of partitions of topics of messages that Notify makes."""
COMMON: Mapping[str, Any] = {"log_level": 2}
"""The client prints its errors to stderr although it also raises them: only critical ones are printed."""
_LOGGED: set[str] = set()
"""The settings that this process has logged as overridden."""
PARTITIONER = "murmur2_random"
"""The partition that Kafka's Java clients choose for a key, so that both kinds of producers keep one order."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One Kafka cluster: its `brokers`, as `host:port,host:port`, and `settings` of librdkafka by name."""

    brokers: str
    settings: Mapping[str, str] = field(repr=False)
    """Not shown in tracebacks or logs, because they may contain passwords."""
    partitions: int = -1
    """The number of partitions of topics of messages that Notify makes; -1: the brokers' default."""
    asked: str = field(default="", repr=False, compare=False)
    """The original URL."""

    @classmethod
    def of(cls, url: str) -> Cluster:
        """The cluster of `kafka://host:port,host:port?security.protocol=SSL&…`.

        Settings in the file of NOTIFY_KAFKA_SETTINGS are added; those of the URL have precedence. Raises InvalidRequest
        for a URL without brokers, or with a user or a path, for an unreadable file, and for a setting that Notify sets
        itself.
        """
        if not url.startswith(SCHEME):
            raise InvalidRequest(f"{without_secrets(url)!r} is not a Kafka URL: write kafka://host:9092,host:9092")
        brokers, _, query = url.removeprefix(SCHEME).partition("?")
        brokers = brokers.rstrip("/")
        if not brokers:
            raise InvalidRequest("a Kafka URL names brokers: kafka://host:9092,host:9092")
        if "@" in brokers:
            raise InvalidRequest(
                "a Kafka URL has no user before its brokers: write kafka://host:9092?sasl.username=…&sasl.password=…, "
                f"or put them into the file that {SETTINGS_FILE} names"
            )
        if "/" in brokers:
            raise InvalidRequest("a Kafka URL is kafka://host:9092,host:9092?name=value&…, without a path")
        settings = _of_file(os.environ.get(SETTINGS_FILE, "")) | _of_query(query)
        for name in sorted(settings.keys() & OWN_SETTINGS):
            raise InvalidRequest(
                f"the Kafka setting {name!r} is Notify's own, so that {OWN_SETTINGS[name]}; leave it out of URL and "
                "settings file"
            )
        return cls(brokers, settings, _partitions(settings.pop(PARTITIONS, "")), url)

    def again(self) -> Cluster:
        """This cluster with the present settings of the file, because a password may have been changed.

        While the file is missing, empty or unreadable, the earlier settings stay: somebody is replacing the file.
        """
        if not self.asked:
            return self
        path = os.environ.get(SETTINGS_FILE, "")
        try:
            if path and not _of_file(path):
                raise InvalidRequest(f"{SETTINGS_FILE}: {path} has no settings")
            return Cluster.of(self.asked)
        except InvalidRequest as error:
            log.warning("the Kafka settings known before count, since the present ones cannot be: %s", error)
            return self

    @property
    def url(self) -> str:
        """The URL of this cluster with all settings, including those of the file: it may contain secrets."""
        own = {} if self.partitions < 0 else {PARTITIONS: str(self.partitions)}
        settings = sorted({**self.settings, **own}.items())
        # A space is encoded as %20, not as a plus.
        query = urllib.parse.urlencode(settings, quote_via=urllib.parse.quote)
        return f"{SCHEME}{self.brokers}?{query}" if query else f"{SCHEME}{self.brokers}"

    def producer(self, own: Mapping[str, Any]) -> Producer:
        """A producer with Notify's `own` settings; a transactional one if they have a `transactional.id`.

        Raises InvalidRequest (`kafka_settings`) for a setting that Kafka's client refuses.
        """
        defaults = {"partitioner": PARTITIONER, "message.max.bytes": MOST_BYTES, "throttle_cb": QUOTAS.note}
        if "transactional.id" not in own:
            return self._client(Producer, own, defaults)
        exchange = Exchange(self.settings)
        producer = self._client(Producer, {**own, **exchange.settings}, defaults)
        # TransactionalProducer has all methods of Kafka's producer.
        return cast(Producer, TransactionalProducer(producer, exchange))

    def transactional_producer(self, own: Mapping[str, Any]) -> TransactionalProducer:
        """The same as `producer`, for `own` settings with a `transactional.id`."""
        return cast(TransactionalProducer, self.producer(own))

    def consumer(self, own: Mapping[str, Any]) -> Consumer:
        """A consumer of committed records that does not commit by itself. Raises InvalidRequest as `producer` does."""
        always = {"enable.auto.commit": False, "isolation.level": "read_committed", "throttle_cb": QUOTAS.note}
        return self._client(Consumer, {**always, **own})

    def admin(self, own: Mapping[str, Any] = MappingProxyType({})) -> AdminClient:
        """A client for topics and groups. Raises InvalidRequest as `producer` does."""
        return self._client(AdminClient, own)

    def _client(
        self, kind: Callable[[dict[str, Any]], T], own: Mapping[str, Any], defaults: Mapping[str, Any] = COMMON
    ) -> T:
        """A client with `own` settings, those of the operators, and `defaults` for the others."""
        self._log_overridden(own)
        try:
            return kind({**COMMON, **defaults, **self.settings, **own, "bootstrap.servers": self.brokers})
        except KafkaException as refused:
            raise _refused(refused.args[0].str()) from refused
        except (TypeError, AttributeError) as refused:  # a setting that takes a function or an object
            raise _refused(refused) from refused

    def _log_overridden(self, own: Mapping[str, Any]) -> None:
        """Log once each setting of the operators that Notify's own settings override."""
        for name, value in self.settings.items():
            own_value = own.get(ALIASES.get(name, name))
            if own_value is not None and str(own_value) != value and name not in {*COMMON, *_LOGGED, "debug"}:
                _LOGGED.add(name)
                log.warning("the Kafka setting %r does not count here: Notify itself sets %s", name, own_value)


def _refused(why: object) -> InvalidRequest:
    return InvalidRequest(f"Kafka's client refuses its settings: {why}", REFUSED_SETTINGS)


def _partitions(text: str) -> int:
    if not text:
        return -1
    number = digits(text)
    if number is None or not 0 < number <= MOST_PARTITIONS:
        raise InvalidRequest(f"the Kafka setting {PARTITIONS} is {text!r}; it is a number from 1 to {MOST_PARTITIONS}")
    return number


def _of_query(query: str) -> dict[str, str]:
    """The settings after a URL's `?`. Percent signs are decoded; a plus stays a plus, since passwords may have it."""
    settings = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:  # the part may belong to a password, and is not shown
            raise InvalidRequest("a setting in a Kafka URL is name=value; write an & within a value as %26")
        settings[urllib.parse.unquote(name)] = urllib.parse.unquote(value)
    return settings


def _of_file(path: str) -> dict[str, str]:
    if not path:
        return {}
    lines = text_of(SETTINGS_FILE, path).splitlines()
    settings: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith(("#", "!")):
            continue
        name, equals, value = line.partition("=")
        if not equals:
            raise InvalidRequest(f"{SETTINGS_FILE}: line {number} of {path} is not name=value")
        settings[name.strip()] = value.strip()
    return settings
