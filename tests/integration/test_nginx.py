"""The real nginx in front of servers: with its default settings, with short times, and while either is restarted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Message, TransactionProducer
from notify.client.transport.servers import Servers
from notify.errors import TransactionRefused
from notify.movers.relay.relay import Relay
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.background import in_background
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.groups import drain, is_subscribed, lag, publish, running, subscribe
from tests.support.http import ask
from tests.support.nginx import Nginx
from tests.support.servers import Started, make_storage
from tests.support.shop import Order, items

MEBIBYTE = 1 << 20


@pytest.fixture
def proxies(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def before(stack: ExitStack, directory: Path, *targets: str, http: str = "", location: str = "") -> Nginx:
    try:
        proxy = Nginx(directory / "nginx", *targets, http=http, location=location)
    except NotAvailable as reason:
        pytest.skip(str(reason))
    stack.callback(proxy.stop)
    return proxy.start()


def test_a_message_above_its_bound_is_refused_before_the_commit(
    server: ServerProcess, proxies: ExitStack, tmp_path: Path, sqlite_engine: sa.Engine, unique: str
) -> None:
    proxy = before(proxies, tmp_path, server.url)
    engine = sqlite_engine
    with TransactionProducer(proxy.url, group=unique, engine=engine) as producer:
        with pytest.raises(TransactionRefused, match=r"nginx/1.*client_max_body_size"), Session(engine) as session:
            session.add(Order(item="large"))
            producer.send(session, Message(unique, b"x" * (MEBIBYTE - 10)))
            session.commit()
        with Session(engine) as session, session.begin():
            session.add(Order(item="small"))
            producer.send(session, Message(unique, "small"))
    assert items(engine) == ["small"]
    assert [message["body"] for message in drain_all(server, unique, 1)] == ["small"]


def drain_all(server: ServerProcess, topic: str, count: int) -> list[dict[str, str]]:
    subscribe(server.url, topic, topic, start="earliest")
    return drain(server.url, topic, topic, count)


@pytest.mark.long
def test_a_relay_makes_smaller_requests_and_lets_others_go_on(
    server: ServerProcess, proxies: ExitStack, tmp_path: Path, sqlite_engine: sa.Engine, unique: str
) -> None:
    """Forty messages of 100,000 bytes are four requests instead of one; one above nginx's bound waits alone."""
    proxy = before(proxies, tmp_path, server.url)
    engine = sqlite_engine
    bodies = [str(n % 10) * 100_000 for n in range(40)]
    large = "x" * (MEBIBYTE - 10)
    with TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox") as producer:
        for key, body in (("l", large), ("l", "after"), *(("k", body) for body in bodies)):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, body, key=key))

    relay = Relay(engine, proxy.url)
    with in_background(relay.run(interval=0.02)) as relaying:
        relaying.until(lambda: relay.total.sent == 40, "all but two")
        proxy.configure(server.url, location="client_max_body_size 10m;")
        proxy.reload()
        relaying.until(lambda: relay.total.sent == 42, "all of them")
    assert relay.total.refused == 0
    found = drain_all(server, unique, 42)
    assert [m["body"] for m in found if m["key"] == "k"] == bodies
    assert [m["body"] for m in found if m["key"] == "l"] == [large, "after"]


def test_a_consumer_polls_for_less_time_than_nginx_waits(
    server: ServerProcess, proxies: ExitStack, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = before(proxies, tmp_path, server.url, location="proxy_read_timeout 2s;")
    got: list[str] = []
    consumer = Consumer(proxy.url, group=unique)
    consumer.subscribe(unique)(lambda message: got.append(message.text))
    with running(consumer, subscribed=True):
        eventually(lambda: "504" in caplog.text, "a poll that nginx ends")
        publish(server.url, unique, ["1"])
        eventually(lambda: got == ["1"] and not lag(server.url, unique), "the message")
    assert "the server is unreachable" not in caplog.text


@pytest.mark.parametrize("page", ["404", "502", "503", "400", "another name"])
def test_nobody_ends_for_a_page_of_nginx(
    server: ServerProcess, proxies: ExitStack, tmp_path: Path, unique: str, page: str
) -> None:
    """It answers itself, is told to pass on, and is restarted: consumer and producer continue."""
    location = "proxy_connect_timeout 1s;" if page == "502" else f"return {page};"
    gone = [f"http://127.0.0.1:{free_port()}"] if page == "502" else []
    if page == "another name":  # nginx sends the name of its group as the host
        group = f"upstream backend {{ server {server.url.removeprefix('http://')}; }}"
        proxy = before(proxies, tmp_path, "http://backend", http=group)
    else:
        proxy = before(proxies, tmp_path, *gone, location=location)
    code, shown = cli("topic", "list", "--url", proxy.url)
    told = ("'backend'", "Host") if page == "another name" else (page, "nginx")
    assert code == 2 and all(word in shown["text"] for word in told)
    got: list[str] = []
    consumer = Consumer(proxy.url, group=unique)
    consumer.subscribe(unique)(lambda message: got.append(message.text))
    with running(consumer), TransactionProducer(proxy.url, group=unique) as producer:
        sending = threading.Thread(target=producer.publish, args=(Message(unique, "1"),))
        sending.start()
        proxy.configure(server.url)
        proxy.reload()
        sending.join(PATIENCE_SECONDS)
        eventually(lambda: is_subscribed(server.url, unique), "a subscription")
        producer.publish(Message(unique, "2"))
        eventually(lambda: "2" in got, "a message")
        proxy.stop()
        proxy.start()
        producer.publish(Message(unique, "3"))
        eventually(lambda: "3" in got, "a message after its restart")


def test_a_connection_that_nginx_ends_is_made_again(
    server: ServerProcess, proxies: ExitStack, tmp_path: Path, unique: str
) -> None:
    """Every third request is the last one of its connection."""
    proxy = before(proxies, tmp_path, server.url, http="keepalive_requests 3;")
    with TransactionProducer(proxy.url, group=unique) as producer:
        for n in range(30):
            producer.publish(Message(unique, str(n)))
    assert [m["body"] for m in drain_all(server, unique, 30)] == [str(n) for n in range(30)]


def test_addresses_that_lead_around_a_proxy_are_not_used_where_they_cannot_be_reached(
    proxies: ExitStack, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Three servers of one registry behind one address, which is all that a client may reach."""
    storage = f"sqlite:///{tmp_path}/storage.db"
    make_storage(storage)
    started = Started(storage, tmp_path, proxies)
    for _ in range(3):
        started.add(NOTIFY_URL=f"http://127.0.0.1:{free_port()}")
    proxy = before(proxies, tmp_path, *(server.url for server in started.servers))

    async def run() -> None:
        servers = Servers(proxy.url, "transactions")
        await servers.refresh()
        assert list(servers.urls()) == [proxy.url]
        await servers.aclose()

    asyncio.run(run())
    assert "NOTIFY_URL" in caplog.text
    with TransactionProducer(proxy.url, group=unique, half_timeout=3.0) as producer:
        for n in range(20):
            producer.publish(Message(unique, str(n)))


def test_a_consumer_whose_acks_reach_another_server_is_told_so(
    proxies: ExitStack, tmp_path: Path, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It handled each message again and again, and the log said that its lease was over."""
    servers = [ServerProcess(tmp_path / name).start() for name in ("a", "b")]
    for server in servers:
        proxies.callback(server.stop)
        subscribe(server.url, unique, unique)
    proxy = before(proxies, tmp_path, *(server.url for server in servers))
    consumer = Consumer(proxy.url, group=unique, lease=1)
    consumer.subscribe(unique)(lambda message: None)

    def is_told() -> bool:
        for server in servers:  # which request reaches which server is chance
            publish(server.url, unique, ["a message"])
        return "do several servers answer at this address?" in caplog.text

    with running(consumer):
        eventually(is_told, "the cause")


@pytest.mark.parametrize("path", ["/v1/topics/{}/queues/0/messages?offset=0", "/v1/admin/topics/{}", "/metrics"])
def test_a_cache_keeps_no_answer(
    server: ServerProcess, proxies: ExitStack, tmp_path: Path, unique: str, path: str
) -> None:
    """A reader would wait for messages that are there, and a caller without rights would see what another one saw."""
    http = f"proxy_cache_path {tmp_path}/cache keys_zone=answers:1m;"
    proxy = before(proxies, tmp_path, server.url, http=http, location="proxy_cache answers; proxy_cache_valid any 1h;")
    publish(server.url, unique, ["1"])
    first = ask(proxy.url, "GET", path.format(unique))
    publish(server.url, unique, ["2"])
    second = ask(proxy.url, "GET", path.format(unique))
    assert (first[0], second[0]) == (200, 200) and first[1] != second[1]
