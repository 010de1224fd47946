"""The guides' code and commands, run as they stand; only addresses and `consumer.run()` are replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import uvicorn

from notify.client import Consumer
from notify.testing import InMemoryServer, ServerProcess
from notify.testing.ports import free_port
from tests.support import pages
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import Command, cli
from tests.support.groups import is_subscribed, lag, publish, running
from tests.support.http import admin, ask, is_ready

ADDRESS = "http://127.0.0.1:7400"


@pytest.fixture
def server(notify_server: InMemoryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InMemoryServer:
    """A server that the commands of a guide reach; they run in an empty directory."""
    monkeypatch.setenv("NOTIFY_URL", notify_server.url)
    monkeypatch.chdir(tmp_path)
    return notify_server


class Guide:
    """A page whose blocks run one after the other, with the names of those before."""

    def __init__(
        self,
        page: str,
        url: str,
        during: Callable[[Consumer], object] = lambda consumer: None,
        addresses: Mapping[str, str] = {},
    ) -> None:
        """`during` is called while a consumer of the page runs; afterwards the consumer stops. `addresses`: by those of
        the page, those of the test."""
        self.page, self.url, self.during = page, url, during
        self.addresses = {ADDRESS: url, **addresses}
        self.names: dict[str, Any] = {"run": self._run}
        self.answers: list[dict[str, Any]] = []
        """The output of the page's commands."""

    def run(self) -> dict[str, Any]:
        for language, code in pages.fences(self.page):
            for theirs, ours in self.addresses.items():
                code = code.replace(theirs, ours)
            if language == "python":
                code = code.replace("consumer.run()", "run(consumer)")
                exec(compile(code, self.page, "exec", dont_inherit=True), self.names)
            elif language == "bash":
                for words in pages.lines(code):
                    if words[:2] == ["pip", "install"]:
                        continue
                    assert words[0] == "notify", words
                    status, answer = cli(*words[1:])
                    assert status == 0, (words, answer)
                    self.answers.append(answer)
        return self.names

    def _run(self, consumer: Consumer) -> None:
        with running(consumer):
            self.during(consumer)


def handled(count: int) -> Callable[[Consumer], object]:
    """Wait until a consumer has handled so many messages."""
    return lambda consumer: eventually(lambda: consumer.handled >= count, f"{count} messages to be handled")


def letters(url: str, group: str) -> list[dict[str, Any]]:
    return list(admin(url, "GET", f"groups/{group}/dead-letters")["messages"])


def test_retries(server: InMemoryServer) -> None:
    server.freeze()
    for body in ('{"item": "book"}', '{"nothing": 1}', '{"item": "a rare book"}'):
        publish(server.url, "order.placed", [body])

    def during(consumer: Consumer) -> None:
        eventually(lambda: consumer.handled == 1 and consumer.failed == 2, "a try of each message")
        assert len(letters(server.url, "payments")) == 1
        for tries in range(3, 7):
            # The settlement of the try before is on its way: the server has it once the message waits again.
            eventually(lambda: lag(server.url, "payments") == 1 and not leased(server.url), "the retry to be noted")
            server.advance(60)
            eventually(lambda tries=tries: consumer.failed == tries, "the next attempt")  # type: ignore[misc]
        eventually(lambda: len(letters(server.url, "payments")) == 2, "the dead letter of the last attempt")

    guide = Guide("guides/retries.md", server.url, during)
    guide.run()
    assert "an order without an item" in guide.answers[0]["text"] and "does not answer" in guide.answers[0]["text"]
    assert letters(server.url, "payments") == []
    assert lag(server.url, "payments") == 1, "the redriven message waits for the group"


def leased(url: str) -> int:
    return sum(int(group["leased"]) for group in admin(url, "GET", "groups")["groups"])


def test_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", "a secret of the tests")
    (code,) = pages.blocks("guides/webhook.md", "python")
    names: dict[str, Any] = {}
    exec(compile(code, "webhook.md", "exec", dont_inherit=True), names)
    begin, watch = map(pages.lines, pages.blocks("guides/webhook.md", "bash"))
    receiver = uvicorn.Server(uvicorn.Config(names["app"], port=free_port(), log_level="warning"))
    thread = threading.Thread(target=receiver.run, daemon=True)
    thread.start()
    place = f"127.0.0.1:{receiver.config.port}"

    def run(commands: list[list[str]]) -> None:
        for words in commands:
            words = [word.replace("https://shop.example", f"http://{place}") for word in words]
            status, answer = cli(*words[1:])
            assert status == 0, (words, answer)

    with InMemoryServer(webhook_hosts=place, webhook_secret="a secret of the tests") as server:
        monkeypatch.setenv("NOTIFY_URL", server.url)
        run(begin)
        publish(server.url, "order.placed", ["a", "b"])
        eventually(lambda: lag(server.url, "points") == 0, "the messages to be posted")
        for forged in ({}, {"notify-signature": "no signature"}, {"notify-signature": "t=1,v1=00"}):
            assert ask(f"http://{place}", "POST", "/notify", {"messages": []}, headers=forged)[0] == 403
        run(watch)
        assert admin(server.url, "GET", "pushes")["pushes"] == {}
    assert sorted(names["points"].values()) == ["a", "b"]
    receiver.should_exit = True
    thread.join(PATIENCE_SECONDS)


def test_order(server: InMemoryServer) -> None:
    names = Guide("guides/order.md", server.url, handled(6)).run()
    assert names["steps"] == {"17": ["placed", "paid", "shipped"], "18": ["placed", "paid", "shipped"]}
    assert len(admin(server.url, "GET", "topics/order")["queues"]) == 8


def test_withdraw(server: InMemoryServer) -> None:
    server.freeze()
    names = Guide("guides/withdraw.md", server.url).run()
    names["engine"].dispose()
    assert names["outcomes"] == ["WITHDRAWN", "WITHDRAWN"]
    server.advance(7201)
    assert sorted(m.text for m in server.messages("payment.remind")) == ["order 9", '{"order":8}']


def test_dedupe(server: InMemoryServer) -> None:
    server.freeze()
    Guide("guides/dedupe.md", server.url).run()
    server.advance(61)
    assert [m.json() for m in server.messages("product.index")] == [{"product": 7, "change": 0}]
    assert [m.json() for m in server.messages("digest.mail")] == [{"count": 9}]


def test_held_keys(server: InMemoryServer) -> None:
    def of_17() -> bool:
        return is_subscribed(server.url, "ledger") and held() == ["17"]

    def held() -> list[str]:
        return [row["key"] for row in admin(server.url, "GET", "groups/ledger/held-keys")["held"]]

    def during(consumer: Consumer) -> None:
        eventually(lambda: consumer.handled == 2 and of_17(), "key 17 to be held, and key 18 to continue")

    guide = Guide("guides/held-keys.md", server.url, during)
    names = guide.run()
    assert names["accounts"] == {"17": 0, "18": 70}
    assert "there is no account 17" in guide.answers[0]["text"]
    assert "one more attempt" in guide.answers[1]["text"] and held() == []
    consumer = Consumer(server.url, group="ledger")
    consumer.subscribe("booking", mode="ordered", max_attempts=3, on_exhausted="hold")(names["on_booking"])
    with running(consumer):
        eventually(lambda: consumer.handled == 2, "the bookings of account 17")
    assert names["accounts"]["17"] == 70


def test_recurring(server: InMemoryServer) -> None:
    def during(consumer: Consumer) -> None:
        eventually(lambda: consumer.handled >= 2, "two beats")

    guide = Guide("guides/recurring.md", server.url, during)
    names = guide.run()
    assert {name for name, _ in names["seen"]} == {"heartbeat"}
    assert len({at for _, at in names["seen"]}) == len(names["seen"]) >= 2
    assert [at.second for at in names["coming"]] == [(names["coming"][0].second + n) % 60 for n in range(3)]
    assert "30 3 * * * in America/New_York" in guide.answers[0]["text"]
    assert [row["name"] for row in admin(server.url, "GET", "schedules")["schedules"]] == ["daily-report", "heartbeat"]


def test_tenants(server: InMemoryServer) -> None:
    guide = Guide("guides/tenants.md", server.url, lambda c: eventually(lambda: c.handled == 303, "all messages"))
    names = guide.run()
    assert "small" not in names["order"][100:] and names["order"].count("small") == 3
    assert len(guide.answers) == 2


def test_delay(server: InMemoryServer) -> None:
    server.freeze()

    def during(consumer: Consumer) -> None:
        assert server.messages() == []
        server.advance(60)
        assert [m.text for m in server.messages()] == ["today only"]
        server.advance(3540)
        assert [m.key for m in server.messages("payment.remind")] == ["7"]
        handled(1)(consumer)
        server.advance(86_400)
        assert [m.text for m in server.messages("report.make")] == ["monthly"]

    assert Guide("guides/delay.md", server.url, during).run()["reminded"] == []


def test_priorities(server: InMemoryServer) -> None:
    for topic in ("news", "order", "urgent"):
        publish(server.url, f"mail.{topic}", [str(number) for number in range(40)])
    names = Guide("guides/priorities.md", server.url, handled(120)).run()
    assert len(names["sent"]) == 120
    classes = admin(server.url, "GET", "groups/mail/priorities")["classes"]
    assert [(c["name"], c["weight"], c["topics"]) for c in classes] == [
        ("high", 6, ["mail.urgent"]),
        ("normal", 3, ["mail.order"]),
        ("low", 1, ["mail.news"]),
    ]


def test_replay(server: InMemoryServer) -> None:
    publish(server.url, "order.placed", ['{"item": "book"}', '{"item": "pen"}'])
    names = Guide("guides/replay.md", server.url, handled(2)).run()
    assert lag(server.url, "statistics") == 2 and [order["item"] for order in names["orders"]] == ["book", "pen"]
    with running(names["consumer"]):
        eventually(lambda: len(names["counted"]) == 4, "the messages to come again")
    assert names["counted"][:2] == names["counted"][2:]


def test_outbox(server: InMemoryServer) -> None:
    guide = Guide("guides/outbox.md", server.url)
    names = guide.run()
    (message,) = server.messages("order.placed")
    assert (message.json(), message.key) == ({"item": "book"}, "1")
    assert "1 transaction sent" in guide.answers[0]["text"] and "book" in guide.answers[1]["text"]
    names["engine"].dispose()


def test_exactly_once(server: InMemoryServer) -> None:
    publish(server.url, "order.placed", ['{"customer": "ada"}', '{"customer": "bob"}'])
    names = Guide("guides/exactly-once.md", server.url, handled(2)).run()
    admin(server.url, "POST", "groups/points/reset", {"topic": "order.placed", "to": "earliest"})
    publish(server.url, "payment.due", ['{"customer": "ada"}'])
    consumer = names["consumer"]
    with running(consumer):
        eventually(lambda: lag(server.url, "points") == 0 and consumer.handled >= 4, "all to come again")
        publish(server.url, "payment.due", ['{"customer": "bob"}'])
        eventually(lambda: len(names["requests"]) >= 1, "the payment")
    with names["engine"].connect() as connection:
        found = connection.execute(sa.text("SELECT customer, sum(amount) FROM points GROUP BY 1 ORDER BY 1")).all()
    assert [tuple(row) for row in found] == [("ada", 10), ("bob", 10)]
    names["engine"].dispose()


def test_from_celery(server: InMemoryServer) -> None:
    names = Guide("migrate/celery.md", server.url, handled(1)).run()
    with names["engine"].connect() as connection:
        assert connection.execute(sa.text("SELECT email, welcomed FROM users")).all() == [("ada@example.org", 1)]
    names["producer"].close()
    names["engine"].dispose()


def test_from_an_outbox(server: InMemoryServer, tmp_path: Path) -> None:
    old = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with old.begin() as connection:
        connection.execute(sa.text("CREATE TABLE outbox (id INTEGER PRIMARY KEY, topic TEXT, payload TEXT, key TEXT)"))
        rows = [{"payload": f'{{"number": {number}}}', "key": str(number % 3)} for number in range(250)]
        connection.execute(
            sa.text("INSERT INTO outbox (topic, payload, key) VALUES ('order.placed', :payload, :key)"), rows
        )
    old.dispose()
    guide = Guide("migrate/own-outbox.md", server.url)
    names = guide.run()
    assert [m.json()["number"] for m in server.messages("order.placed")] == list(range(250))
    assert len(guide.answers[1]["text"].splitlines()) == 10
    with names["engine"].connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM outbox")).scalar() == 0
    names["engine"].dispose()


def test_from_rocketmq(server: InMemoryServer) -> None:
    server.freeze()
    names = Guide("migrate/rocketmq.md", server.url).run()
    (committed,) = server.messages("order.shipped")
    assert committed.key == "17" and len(server.halves("order.shipped")) == 1
    server.advance(10)
    server.wait_until_decided()
    assert len(server.messages("order.shipped")) == 1
    names["producer"].close()


def test_the_example_of_error_codes(server: InMemoryServer, caplog: pytest.LogCaptureFixture) -> None:
    from notify.client import TransactionProducer

    server.freeze()
    names = Guide("errors.md", server.url).run()
    with TransactionProducer(server.url, group="shop") as producer:
        assert names["announce"](producer, "book") is True
        admin(server.url, "PUT", "limits", {"topics": {"order.placed": 1}})
        assert [names["announce"](producer, "pen") for _ in range(3)][-1] is False
    assert any("rate_limited" in record.getMessage() for record in caplog.records)


def shell(page: str, replace: dict[str, str], only: int | None = None) -> Iterator[tuple[list[str], Any]]:
    """Run the commands of a page's shell blocks (of one of them); those that end in `&` continue until the end."""
    begun: list[Command] = []
    scripts = pages.blocks(page, "bash")
    try:
        for script in scripts if only is None else scripts[only : only + 1]:
            for old, new in replace.items():
                script = script.replace(old, new)
            for words in pages.lines(script):
                assert words[0] == "notify", words
                if words[-1] == "&":
                    begun.append(Command(*words[1:-1]).start())
                    if words[1] == "serve":
                        url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
                        eventually(lambda url=url: is_ready(url), f"the server at {url}")  # type: ignore[misc]
                    yield words, begun[-1]
                else:
                    yield words, cli(*words[1:])
    finally:
        for command in begun:
            command.close()


@pytest.mark.long
def test_more_than_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ports = {number: str(free_port()) for number in ("7400", "7401")}
    queue = f"http://127.0.0.1:{ports['7400']}"
    for words, answer in shell("distributed.md", ports):
        if words[-1] != "&" and words[1:3] != ["node", "list"]:
            assert answer[0] == 0, (words, answer)
        if words[1:3] == ["message", "send"]:  # the relay moves it when it looks next
            eventually(lambda: ask(queue, "GET", "/v1/topics/greetings")[0] == 200, "the message in the queue")
        if words[1:3] == ["topic", "tail"]:
            assert answer[1]["text"].splitlines()[0].endswith("\thello")
        if words[1:3] == ["node", "list"]:
            # Members are known from their heartbeats on, and the server of a busy machine may answer late at first.
            eventually(lambda words=words: are_members(cli(*words[1:])[1]["text"]), "two servers and a relay")  # type: ignore[misc]


def are_members(listed: str) -> bool:
    return (listed.count("\tserver\t"), listed.count("\trelay\t")) == (2, 1)


@pytest.mark.long
def test_upgrade_and_a_lost_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = ServerProcess(tmp_path / "data").start()
    monkeypatch.setenv("NOTIFY_URL", server.url)
    try:
        publish(server.url, "orders", ["kept"])
        for _, (status, answer) in shell("guides/upgrade.md", {}):
            assert status == 0, answer
        backup = shell("guides/disaster.md", {}, only=0)
        assert next(backup)[1][0] == 0 and next(backup, None) is None
    finally:
        server.kill()
        server.stop()
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("NOTIFY_URL", url)
    for words, answer in shell("guides/disaster.md", {"7400": port}, only=1):
        if words[1] == "serve":
            pulled = ask(url, "GET", "/v1/topics/orders/queues/0/messages?offset=0&max=10")[1]["messages"]
            assert [message["body"] for message in pulled] == ["kept"]
        else:
            assert answer[0] == 0, answer


def test_every_block_runs() -> None:
    """A page with code in a language that runs is run by a test. Commands in plain blocks are looked up (test_docs)."""
    run = {page for page in pages.pages() for language, _ in pages.fences(page) if language in RUN}
    texts = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    assert run, "the pages have no code"
    assert [page for page in sorted(run) if f'"{page}"' not in texts] == []
    known = {language for page in pages.pages() for language, _ in pages.fences(page)}
    assert known <= {*RUN, "", "text"}


RUN = {"python", "bash", "javascript"}


def test_large_bodies(server: InMemoryServer, tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'bodies'}"
    guide = Guide("guides/large-bodies.md", server.url, handled(2), {"s3://shop-bodies": store})
    names = guide.run()
    assert names["sizes"] == {"2026-10": 5 + 256 * 4_000, "2026-11": 5 + 50_000}
    (stored,) = (path for path in (tmp_path / "bodies").rglob("*") if path.is_file())
    assert stored.stat().st_size < 100_000, "it is compressed, too"
    assert [answer["text"].startswith("1 bodies, 1 of them younger") for answer in guide.answers] == [True, True]
