"""The producers that the setting NOTIFY configures, one for each database: made at first use, closed at exit."""

from __future__ import annotations

import atexit
import time
from datetime import datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS

from notify.client.django.producer import DjangoProducer
from notify.client.producer.options import FLUSH_SECONDS, ProducerOptions, check_flush
from notify.protocol.message import Message

OPTIONS = tuple(name.upper() for name in ProducerOptions.__annotations__)
"""The optional keys of NOTIFY: the options of every producer, in capitals."""
_EXAMPLE = 'NOTIFY = {"URL": "http://127.0.0.1:7400", "GROUP": "shop"}'
_producers: dict[str, DjangoProducer] = {}


def make(using: str, **changed: Any) -> DjangoProducer:
    """Make a producer from the setting NOTIFY; `changed`: arguments that replace those of the setting.

    Raises ImproperlyConfigured for missing or unknown keys, InvalidRequest for invalid values, and BindingRefused for a
    database that cannot carry messages.
    """
    setting = getattr(settings, "NOTIFY", None)
    if not isinstance(setting, dict):
        raise ImproperlyConfigured(f"the setting NOTIFY says where messages go; write {_EXAMPLE}")
    missing = [name for name in ("URL", "GROUP") if not setting.get(name)]
    if missing:
        raise ImproperlyConfigured(f"the setting NOTIFY lacks {' and '.join(missing)}; write {_EXAMPLE}")
    unknown = sorted(map(str, setting.keys() - {"URL", "GROUP", *OPTIONS}))
    if unknown:
        raise ImproperlyConfigured(
            f"the setting NOTIFY has unknown keys: {', '.join(unknown)}; there are URL, GROUP, {', '.join(OPTIONS)}"
        )
    options: dict[str, Any] = {name.lower(): setting[name] for name in OPTIONS if name in setting}
    return DjangoProducer(setting["URL"], group=setting["GROUP"], using=using, **(options | changed))


def producer(using: str | None = None) -> DjangoProducer:
    """The process's producer for the default database or another, from the setting NOTIFY. Raises the errors of
    `make`."""
    alias = DEFAULT_DB_ALIAS if using is None else using
    existing = _producers.get(alias)
    # Several first threads may each make a producer, of which one is kept; a new producer runs nothing yet.
    return existing if existing is not None else _producers.setdefault(alias, make(alias))


def send(message: Message, *, using: str | None = None) -> None:
    """Send a message with the current transaction of the default database or another one: see DjangoProducer.send."""
    producer(using).send(message)


def publish(message: Message) -> str:
    """Send a message without a transaction and return its id, once it is durable; see DjangoProducer.publish."""
    return producer().publish(message)


def schedule(name: str, message: Message, **when: Any) -> list[datetime]:
    """Send a message repeatedly, and return the next instants; see TransactionProducer.schedule for the arguments.

    Declare it in a data migration, a management command or `AppConfig.ready`: the same declaration again changes
    nothing.
    """
    return producer().schedule(name, message, **when)


def unschedule(name: str) -> bool:
    """Delete a schedule; whether there was one."""
    return producer().unschedule(name)


def start(using: str | None = None) -> None:
    """Answer checks from now on; call it in wsgi.py or asgi.py. Without it, checks are answered from the first commit
    with a message on."""
    producer(using).start()


def flush(timeout: float = FLUSH_SECONDS) -> list[str]:
    """Wait at most `timeout` seconds until the server has every outcome of this process, whichever its database; see
    TransactionProducer.flush."""
    end = time.monotonic() + check_flush(timeout)
    return [left for made in list(_producers.values()) for left in made.flush(max(0.0, end - time.monotonic()))]


def close() -> None:
    """Close all producers, which send the outcomes that wait. The next use makes new producers."""
    while _producers:
        _producers.popitem()[1].close()


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "NOTIFY":
        close()


setting_changed.connect(_forget, dispatch_uid="notify.client.django")
# A command that ends right after its transaction still has outcomes to send; otherwise each would need a check.
atexit.register(close)
