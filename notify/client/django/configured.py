"""Producers of the setting NOTIFY, one for each database, made at their first use and closed as the process ends."""

from __future__ import annotations

import atexit
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS

from notify.client.django.producer import DjangoProducer
from notify.message import Message

OPTIONS = (
    "MODE",
    "KEEP_MESSAGES",
    "BATCHING",
    "ANSWER_CHECKS",
    "HALF_TIMEOUT",
    "CHECK_AFTER",
    "PURGE_AFTER",
    "TOKEN",
    "TLS",
    "CHOOSER",
)
"""Keys of NOTIFY that may be left out: arguments of DjangoProducer, in capitals."""
_EXAMPLE = 'NOTIFY = {"URL": "http://127.0.0.1:7400", "GROUP": "shop"}'
_producers: dict[str, DjangoProducer] = {}


def make(using: str, **changed: Any) -> DjangoProducer:
    """A producer of the setting NOTIFY; `changed`: arguments that differ from it.

    Raises ImproperlyConfigured for keys that are missing or unknown, InvalidRequest for values that cannot be, and
    BindingRefused for a database that cannot carry messages.
    """
    given = getattr(settings, "NOTIFY", None)
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"the setting NOTIFY says where messages go; write {_EXAMPLE}")
    missing = [name for name in ("URL", "GROUP") if not given.get(name)]
    if missing:
        raise ImproperlyConfigured(f"the setting NOTIFY lacks {' and '.join(missing)}; write {_EXAMPLE}")
    unknown = sorted(map(str, given.keys() - {"URL", "GROUP", *OPTIONS}))
    if unknown:
        raise ImproperlyConfigured(
            f"the setting NOTIFY has unknown keys: {', '.join(unknown)}; there are URL, GROUP, {', '.join(OPTIONS)}"
        )
    options: dict[str, Any] = {name.lower(): given[name] for name in OPTIONS if name in given}
    return DjangoProducer(given["URL"], group=given["GROUP"], using=using, **(options | changed))


def producer(using: str | None = None) -> DjangoProducer:
    """The process's producer of the setting NOTIFY, for the default database or another. Raises what `make` does."""
    alias = DEFAULT_DB_ALIAS if using is None else using
    known = _producers.get(alias)
    # Threads that come first at the same time make several; nothing runs for one yet, and one is kept.
    return known if known is not None else _producers.setdefault(alias, make(alias))


def send(message: Message, *, using: str | None = None) -> None:
    """Send a message with the current transaction of the default database or another one: see DjangoProducer.send."""
    producer(using).send(message)


def publish(message: Message) -> str:
    """Send a message without a transaction; its id. Durable when it returns: see DjangoProducer.publish."""
    return producer().publish(message)


def start(using: str | None = None) -> None:
    """Answer checks from now on, for wsgi.py or asgi.py; without it that begins with the first commit of a message."""
    producer(using).start()


def close() -> None:
    """Close all producers: outcomes that wait are sent. The next use makes new ones."""
    while _producers:
        _producers.popitem()[1].close()


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "NOTIFY":
        close()


setting_changed.connect(_forget, dispatch_uid="notify.client.django")
# A command that ends after its transaction has outcomes that wait; without them each would need a check.
atexit.register(close)
