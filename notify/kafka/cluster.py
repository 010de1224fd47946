"""Kafka's clients for a URL: the brokers' addresses and what their operators ask for, such as TLS and SASL."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from notify.errors import InvalidRequest
from notify.kafka.records import SCHEME

T = TypeVar("T")

SETTINGS_FILE = "NOTIFY_KAFKA_SETTINGS"
"""The environment variable with the path of a file of client settings, `name=value` a line, as Kafka reads."""
OWN_SETTINGS = frozenset(
    (
        "bootstrap.servers", "metadata.broker.list", "transactional.id", "enable.idempotence", "acks",
        "request.required.acks", "group.id", "group.instance.id", "enable.auto.commit", "enable.auto.offset.store",
        "auto.offset.reset", "isolation.level", "enable.partition.eof", "partition.assignment.strategy",
        "group.protocol",
    )
)  # fmt: skip
"""Settings that Notify's promises hang on: it sets them itself."""
MOST_BYTES = 1_000_000_000
"""The client's own bound of a record, by far the largest: brokers and topics have theirs."""
PARTITIONS, MOST_PARTITIONS = "notify.partitions", 10_000
"""A setting that is no client's: how many partitions topics of messages get that Notify makes."""
COMMON: Mapping[str, Any] = {"log_level": 2}
"""The client prints to stderr what it also raises; only what is critical, then."""
PARTITIONER = "murmur2_random"
"""The partition that Kafka's Java clients choose for a key, so that both kinds of producers keep one order."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One Kafka cluster: `brokers` as `host:port,host:port`, `settings` of librdkafka by name."""

    brokers: str
    settings: Mapping[str, str] = field(repr=False)
    """Not shown in a traceback or a log: passwords may be among them."""
    partitions: int = -1
    """The partitions of topics of messages that Notify makes; -1: the brokers' default."""
    asked: str = field(default="", repr=False, compare=False)
    """The URL as it was given."""

    @classmethod
    def of(cls, url: str) -> Cluster:
        """The cluster of `kafka://host:port,host:port?security.protocol=SSL&…`.

        Settings of the file that NOTIFY_KAFKA_SETTINGS names count, too; those of the URL win. Raises InvalidRequest
        for a URL without brokers or with more than them before its settings, a file that cannot be read, and a setting
        that is Notify's own.
        """
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
            raise InvalidRequest(f"the Kafka setting {name!r} is Notify's own; leave it out of URL and settings file")
        return cls(brokers, settings, _partitions(settings.pop(PARTITIONS, "")), url)

    def again(self) -> Cluster:
        """This cluster with what the file of settings says now: a password may have been changed. Raises as `of`."""
        return Cluster.of(self.asked) if self.asked else self

    @property
    def url(self) -> str:
        """The URL of this cluster with every setting, those of the file included: it may hold secrets."""
        own = {} if self.partitions < 0 else {PARTITIONS: str(self.partitions)}
        settings = sorted({**self.settings, **own}.items())
        query = urllib.parse.urlencode(settings, quote_via=urllib.parse.quote)  # a space is no plus here
        return f"{SCHEME}{self.brokers}?{query}" if query else f"{SCHEME}{self.brokers}"

    def producer(self, own: Mapping[str, Any]) -> Producer:
        """A producer with Notify's `own` settings. Raises InvalidRequest for a setting that Kafka's client refuses."""
        return self._made(
            Producer, {"partitioner": PARTITIONER, "message.max.bytes": MOST_BYTES, **self.settings, **own}
        )

    def consumer(self, own: Mapping[str, Any]) -> Consumer:
        """A consumer that reads what is committed, and commits nothing by itself. Raises InvalidRequest as above."""
        fixed = {"enable.auto.commit": False, "isolation.level": "read_committed"}
        return self._made(Consumer, {**self.settings, **fixed, **own})

    def admin(self, own: Mapping[str, Any] = MappingProxyType({})) -> AdminClient:
        """A client for topics and groups. Raises InvalidRequest as above."""
        return self._made(AdminClient, {**self.settings, **own})

    def _made(self, kind: Callable[[dict[str, Any]], T], settings: Mapping[str, Any]) -> T:
        try:
            return kind({**COMMON, **settings, "bootstrap.servers": self.brokers})
        except KafkaException as refused:
            raise InvalidRequest(f"Kafka's client refuses its settings: {refused.args[0].str()}") from refused
        except (TypeError, AttributeError) as refused:  # a setting that takes a function or an object
            raise InvalidRequest(f"Kafka's client refuses its settings: {refused}") from refused


def _partitions(text: str) -> int:
    if not text:
        return -1
    if not text.isdecimal() or not 0 < int(text) <= MOST_PARTITIONS:
        raise InvalidRequest(f"the Kafka setting {PARTITIONS} is {text!r}; it is a number from 1 to {MOST_PARTITIONS}")
    return int(text)


def _of_query(query: str) -> dict[str, str]:
    """The settings behind a URL's `?`. Percent signs are decoded; a plus is one, since passwords have it."""
    settings = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:  # it may be part of a password, and is not shown
            raise InvalidRequest("a setting in a Kafka URL is name=value; write an & within a value as %26")
        settings[urllib.parse.unquote(name)] = urllib.parse.unquote(value)
    return settings


def _of_file(path: str) -> dict[str, str]:
    if not path:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise InvalidRequest(f"{SETTINGS_FILE}: {path} cannot be read: {error.strerror}") from None
    settings: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith(("#", "!")):
            continue
        name, equals, value = line.partition("=")
        if not equals:
            raise InvalidRequest(f"{SETTINGS_FILE}: line {number} of {path} is not name=value")
        settings[name.strip()] = value.strip()
    return settings
