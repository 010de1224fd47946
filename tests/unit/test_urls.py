"""No secret of a URL is in an error or a log."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from notify.cli.doctor import _server_findings
from notify.client import Consumer, Message, Reader, TransactionProducer
from notify.client.transport.http import HttpClient
from notify.errors import InvalidRequest, NotFound
from notify.movers.sinks.sink import open_sink
from notify.object_store.filesystem import opened
from notify.runtime.databases import shown_url
from notify.runtime.urls import place_of, server_address, without_secrets
from notify.server.access.oidc import Provider
from notify.server.settings import Settings
from notify.server.webhooks import check_address
from notify.spark.watch.alarms import Alarms
from notify.storage.sql.engines import open_engine, visitor_engine
from notify.testing.process import ServerProcess

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("shop=postgresql://app:s3cret@db/shop", "shop=postgresql://app:***@db/shop"),
        ("postgresql://app:s3cret%40:x@db/shop?sslmode=require", "postgresql://app:***@db/shop?sslmode=require"),
        ("postgresql://app:a@s3cret@db/shop", "postgresql://app:***@db/shop"),
        ("postgresql://app:a/s3cret@db/shop?name=a@b", "postgresql://app:***@db/shop?name=a@b"),
        ("postgresql://db/shop?user=app&password=s3cret", "postgresql://db/shop?user=app&password=***"),
        ("a=mysql://u:s3cret@h/d b=mysql://v:s3cret@[::1]:5/d", "a=mysql://u:***@h/d b=mysql://v:***@[::1]:5/d"),
        ("http://a:1,http://u:s3cret@b:2/x", "http://a:1,http://***@b:2/x"),
        ("https://s3cret@b:2/x", "https://***@b:2/x"),
        ("https://hooks/x?token=s3cret&a=b", "https://hooks/x?token=***&a=b"),
        ("sc://h:1/;token=s3cret;use_ssl=true", "sc://h:1/;token=***;use_ssl=true"),
        (
            "kafka://a:9093?security.protocol=SSL&sasl.password=s3cret&sasl.username=u&ssl.key.password=x",
            "kafka://a:9093?security.protocol=SSL&sasl.password=***&sasl.username=u&ssl.key.password=***",
        ),
    ],
)
def test_a_url_is_shown_without_its_secrets(given: str, shown: str) -> None:
    assert without_secrets(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("https://hooks.example/services/T0/B0/s3cret", "https://hooks.example/***"),
        ("https://hooks.example:8443?s3cret", "https://hooks.example:8443/***"),
        ("https://user:a/s3cret@hooks.example/s3cret", "https://***@hooks.example/***"),
        ("hooks.example/s3cret", "hooks.example/***"),
        ("https:/hooks.example/s3cret", "https:/***"),
        ("http:\\\\hooks.example\\s3cret", "http:\\\\hooks.example/***"),
        ("https://hooks.example s3cret", "https://hooks.example/***"),
        ("http://[::1]:9/", "http://[::1]:9/"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9"),
    ],
)
def test_only_the_place_of_a_webhook_is_shown(given: str, shown: str) -> None:
    """Its path lets in whoever knows it, as with those of chats."""
    assert place_of(given) == shown


@pytest.mark.parametrize(
    "plain", ["sqlite:////tmp/a.db", "http://[::1]:7400/worker-1", "s3://bucket/a@b", "kafka://a:1,b:2"]
)
def test_a_url_without_a_secret_is_shown_unchanged(plain: str) -> None:
    assert without_secrets(plain) == plain


ADDRESSES = [
    f"http://user:{SECRET}@127.0.0.1:9",
    f"http://user:{SECRET}/x@127.0.0.1:9",  # neither is the port of "user"
    f"http://user:{SECRET},x@127.0.0.1:9",  # nor are these two addresses
    f"http://127.0.0.1:9,http://user:{SECRET}@127.0.0.1:9",
    f"https://{SECRET}@127.0.0.1:port",
    f"kafka://127.0.0.1:9?sasl.password={SECRET}",
]


def published(url: str) -> None:
    with TransactionProducer(url, group="g") as producer:
        producer.publish(Message("t", "x"))


def consumed(url: str) -> None:
    consumer = Consumer(url, group="g")
    consumer.subscribe("t")(print)
    consumer.run()


def read(url: str) -> None:
    with Reader(url) as reader:
        next(reader.read("t"))


@pytest.mark.parametrize("url", ADDRESSES)
@pytest.mark.parametrize("use", [server_address, HttpClient, published, consumed, read, open_sink])
def test_an_address_with_a_password_is_refused_without_it(use: Any, url: str) -> None:
    if url.startswith("kafka") and use in (consumed, open_sink):
        return  # consumers and movers reach Kafka themselves
    with pytest.raises(InvalidRequest) as refused:
        use(url)
    assert SECRET not in str(refused.value)
    assert "NOTIFY_TOKEN" in str(refused.value) or url.startswith("kafka")


@pytest.mark.parametrize("url", ADDRESSES)
def test_doctor_shows_no_password(url: str) -> None:
    assert SECRET not in " ".join(_server_findings(url))


DATABASES = [
    f"oracle://user:{SECRET}@h/d",
    f"postgresql+none://user:{SECRET}@h/d",
    f"postgresql://user:a@b:{SECRET}@h/d",  # the @ of a password makes a port of its end
    f"{SECRET}",
]


@pytest.mark.parametrize("url", DATABASES)
@pytest.mark.parametrize("use", [open_engine, visitor_engine])
def test_the_url_of_a_database_is_refused_without_its_password(use: Any, url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        use(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("host", ["notify..svc", "x" * 64, "\u202e"])
@pytest.mark.parametrize("use", [server_address, HttpClient, published, consumed, read, open_sink])
def test_a_host_that_no_resolver_takes_is_named(use: Any, host: str) -> None:
    """Connecting raised UnicodeError: a traceback of commands, and a reader tried again for ever."""
    with pytest.raises(InvalidRequest, match="is not a valid host name: each label has 1 to 63 characters"):
        use(f"http://{host}:7400")


@pytest.mark.parametrize(("url", "sign"), [("http://h:1?room=a", "?"), ("http://h:1/#topics", "#")])
@pytest.mark.parametrize("use", [server_address, HttpClient, published, consumed, read, open_sink])
def test_what_follows_an_address_is_not_ignored(use: Any, url: str, sign: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"leave out what follows \{sign}"):
        use(url)


def test_a_missing_route_names_what_was_put_before_it(server: ServerProcess) -> None:
    with pytest.raises(NotFound, match="there is no POST /v1/v1/messages: leave '/v1' out of the server's address"):
        published(f"{server.url}/v1")
    with pytest.raises(NotFound, match="there is no POST /topics/v1/messages: leave '/topics' out"):
        published(f"{server.url}/topics")


@pytest.mark.parametrize("use", [open_engine, visitor_engine])
def test_the_host_of_a_database_or_webhook_is_looked_at_as_well(use: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"'db\.\.svc' is not a valid host name"):
        use("postgresql://user@db..svc/shop")
    with pytest.raises(InvalidRequest, match="is not an address of a webhook"):
        check_address("https://hooks..svc/x", Settings(webhook_hosts="hooks..svc:443", webhook_secret="s"))


@pytest.mark.parametrize(
    "driver", ["postgresql+asyncpg", "postgresql+psycopg_async", "mysql+aiomysql", "sqlite+aiosqlite"]
)
@pytest.mark.parametrize("use", [open_engine, visitor_engine])
def test_a_driver_for_asyncio_is_refused(use: Any, driver: str) -> None:
    """The URL of a service that uses asyncio: each command ended with the traceback of a greenlet that was missing."""
    with pytest.raises(InvalidRequest, match=rf"asyncio: write {driver.partition('+')[0]}://"):
        use(f"{driver}://u:{SECRET}@h/d" if "sqlite" not in driver else f"{driver}:///x.db")


@pytest.mark.parametrize("use", [open_engine, visitor_engine])
def test_a_url_of_psycopg2_is_read_by_psycopg(use: Any) -> None:
    """The URL of a service: a relay ended with "'list' object is not callable" once it waited for a commit."""
    engine = use(f"postgresql+psycopg2://u:{SECRET}@h/d?sslmode=require")
    assert (engine.dialect.driver, dict(engine.url.query)) == ("psycopg", {"sslmode": "require"})


@pytest.mark.parametrize("use", [open_engine, visitor_engine])
def test_another_driver_of_postgresql_is_refused(use: Any) -> None:
    """A relay ended with "'Connection' object has no attribute 'notifies'"."""
    with pytest.raises(InvalidRequest, match=r"driver pg8000 is not psycopg, .* write postgresql://"):
        use(f"postgresql+pg8000://u:{SECRET}@h/d")


def test_an_engine_is_shown_without_its_password() -> None:
    engine = sa.create_engine(f"postgresql+psycopg://u:{SECRET}@h/d?password={SECRET}")
    assert shown_url(engine) == "postgresql+psycopg://u:***@h/d?password=***"


@pytest.mark.long
def test_other_addresses_are_refused_without_their_passwords() -> None:
    for refuse in (
        lambda: check_address(f"http://user:{SECRET}@h/x", Settings()),
        lambda: check_address(f"h/{SECRET}", Settings()),
        lambda: check_address(f"http://h/{SECRET}", Settings()),
        lambda: Provider(f"https://user:{SECRET}@issuer", "notify", "rights"),
        lambda: Alarms(None, f"https://user:{SECRET}@h", lambda: 0.0),  # type: ignore[arg-type]
        lambda: Alarms(None, f"h/{SECRET}", lambda: 0.0),  # type: ignore[arg-type]
        lambda: opened(f"s3://key:{SECRET}@bucket/prefix"),
        lambda: opened(f"s3://key:{SECRET}/x@bucket/prefix"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            refuse()
        assert SECRET not in str(refused.value)
