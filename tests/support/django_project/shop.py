"""The smallest service on Django: orders in a database of any kind, and a producer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import django
import pymysql
import sqlalchemy as sa
from django.conf import settings
from django.db import connections, transaction

from notify.client import Message
from tests.support.clock import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from notify.client.django import DjangoProducer
    from notify.testing import InMemoryServer, Stored

ENGINES = {"sqlite": "sqlite3", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
SERVED: list[Shop] = []
"""The last one is the shop that the views work for."""


def set_up() -> None:
    """Set Django up, once in a process. Each test adds a database of its own, under an alias of its own."""
    if settings.configured:
        return
    if find_spec("MySQLdb") is None:  # mysqlclient is not installed
        pymysql.install_as_MySQLdb()
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["notify.client.django", "tests.support.django_project"],
        ROOT_URLCONF="tests.support.django_project.urls",
        SECRET_KEY="of tests",
        ALLOWED_HOSTS=["*"],
        USE_TZ=True,
        TIME_ZONE="Asia/Tokyo",  # the tables hold UTC, whatever the project's time zone is
        LOGGING_CONFIG=None,
    )
    django.setup()


def database_of(url: str, **options: Any) -> dict[str, Any]:
    """The database of a SQLAlchemy URL, as DATABASES has it. `options` are keys of it."""
    given = sa.make_url(url)
    engine = f"django.db.backends.{ENGINES[given.get_backend_name()]}"
    if given.get_backend_name() == "sqlite":
        # A deferred transaction that reads first is refused its first write at once while another one writes.
        waiting = {"timeout": 60, "transaction_mode": "IMMEDIATE"}
        return {"ENGINE": engine, "NAME": given.database, "OPTIONS": waiting} | options
    return {
        "ENGINE": engine,
        "NAME": given.database,
        "USER": given.username or "",
        "PASSWORD": given.password or "",
        "HOST": given.query.get("unix_socket") or given.query.get("host") or given.host or "",
        "PORT": given.port or "",
    } | options


@contextmanager
def added(alias: str, database: dict[str, Any]) -> Iterator[str]:
    """The alias of a database that the project has meanwhile."""
    set_up()
    known = connections.settings
    known.update(connections.configure_settings({"default": known["default"], alias: database}))
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del known[alias]


def make_tables(alias: str) -> None:
    """The shop's tables, and Notify's."""
    from notify.client.django import create_tables
    from tests.support.django_project.models import Order, Part, Points

    with connections[alias].schema_editor() as editor:
        for model in (Order, Points, Part):
            editor.create_model(model)
    create_tables(alias)


def add(alias: str, item: str) -> Any:
    """Add an order."""
    from tests.support.django_project.models import Order

    return Order.objects.using(alias).create(item=item)


class Shop:
    """A producer on a database of Django's, and its messages on the server."""

    def __init__(self, alias: str, server: InMemoryServer, name: str, **options: Any) -> None:
        self.alias = alias
        self.server = server
        self.topic = name
        self.producer = self.new_producer(**options)

    def new_producer(self, **options: Any) -> DjangoProducer:
        """A producer of the shop's group."""
        from notify.client.django import DjangoProducer

        known: dict[str, Any] = {"half_timeout": PATIENCE_SECONDS, "group": self.topic, "using": self.alias}
        return DjangoProducer(options.pop("url", self.server.url), **(known | options))

    @property
    def connection(self) -> Any:
        return connections[self.alias]

    def atomic(self, **options: Any) -> Any:
        return transaction.atomic(using=self.alias, **options)

    def send(self, body: Any, **options: Any) -> None:
        self.producer.send(Message(self.topic, body, **options))

    def add(self, item: str) -> Any:
        """Add an order, without a message."""
        return add(self.alias, item)

    def order(self, item: str) -> None:
        """Add an order, and send its item."""
        self.add(item)
        self.send(item)

    def items(self) -> list[str]:
        from tests.support.django_project.models import Order

        return sorted(Order.objects.using(self.alias).values_list("item", flat=True))

    def rows(self) -> int:
        """How many rows half_message has."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM half_message")
            return int(cursor.fetchone()[0])

    def messages(self) -> list[Stored]:
        """Close the producer, wait until every half is decided, and return the messages in the order of the queue."""
        eventually(lambda: not self.server.halves(self.topic), "the outcome of every half")
        self.producer.close()
        return self.server.messages(self.topic)

    def delivered(self) -> list[str]:
        return sorted(m.text for m in self.messages())


def empty(alias: str) -> None:
    """Delete all orders, and all rows of half_message and of the inbox."""
    with connections[alias].cursor() as cursor:
        for table in ("django_project_part", "django_project_order", "half_message", "notify_inbox"):
            cursor.execute(f"DELETE FROM {table}")
