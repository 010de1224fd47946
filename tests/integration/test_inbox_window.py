"""A server knows since when an inbox is whole: older messages are not replayed unless told so."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, ReceivedMessage
from notify.client.inbox import inbox as inboxes
from notify.client.tables.definitions import notify_inbox, notify_source
from notify.client.tables.old_rows import DAY
from notify.errors import Conflict, InvalidRequest
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import Caller, die, lag, publish, redrive, running, subscribe
from tests.support.http import REASON, admin, ask, post, refusal
from tests.support.servers import GuardedInMemory
from tests.support.shop import Order, items
from tests.support.transactions import new_id

BEFORE_INBOX = (409, "before_inbox")


def consumer_of(url: str, engine: sa.Engine, group: str = "g", **options: Any) -> Consumer:
    consumer = Consumer(url, group=group, inbox=Inbox(engine))

    @consumer.subscribe("t", **options)
    def handle(message: ReceivedMessage, session: Session) -> None:
        session.add(Order(item=message.text))

    return consumer


def consume(url: str, engine: sa.Engine, group: str = "g", **options: Any) -> int:
    """Run the group until the server knows of its inbox and nothing is left; return how many messages it handled."""
    consumer = consumer_of(url, engine, group, **options)
    known = Inbox(engine).call(inboxes.whole_from)

    def is_done() -> bool:
        told = whole_from(url, group)
        return told is not None and datetime.fromisoformat(told) >= known and lag(url, group) == 0

    with running(consumer, subscribed=True):
        eventually(is_done, "everything to be settled")
    return consumer.handled


def whole_from(url: str, group: str = "g") -> str | None:
    """The instant since which the inbox is whole, as the server was told; None if it was not."""
    (subscription,) = [s for s in admin(url, "GET", f"groups/{group}")["subscriptions"] if s["topic"] == "t"]
    return str(subscription["inbox_from"]) if subscription["inbox_from"] else None


def purge_all(engine: sa.Engine) -> None:
    """Do what a purge a minute from now would do: delete every row, and note that."""
    later_ms = round(time.time() * 1000) + 60_000
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(inbox_from=later_ms))
        connection.execute(notify_inbox.delete())


RESET = {"topic": "t", "to": "earliest"}


@pytest.mark.long
def test_a_reset_to_before_a_purge_is_refused(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["a"])
    assert consume(url, shop_engine) == 1
    assert admin(url, "POST", "groups/g/reset", RESET)["result"]["queues"][0]["again"] == 1
    consume(url, shop_engine)
    assert len(items(shop_engine)) == 1, "the inbox was whole"

    purge_all(shop_engine)
    consume(url, shop_engine)  # the consumer tells of the purge as it starts
    assert refusal(url, "POST", "groups/g/reset", **RESET) == BEFORE_INBOX
    assert refusal(url, "POST", "groups/g/reset", **RESET, dry_run=True) == BEFORE_INBOX
    assert admin(url, "POST", "groups/g/reset", {"topic": "t", "to": "latest"})["status"] == 200
    flags = ("--topic", "t", "--to", "earliest", "--reason", "x", "--url", url)
    assert cli("group", "reset", "g", *flags, "--json")[0] == 2
    assert cli("group", "reset", "g", *flags, "--force", "--dry-run", "--json")[0] == 0
    assert admin(url, "POST", "groups/g/reset", {**RESET, "replay_effects": True, "dry_run": True})["status"] == 200
    admin(url, "POST", "groups/g/reset", {**RESET, "force": True})
    consume(url, shop_engine)
    assert len(items(shop_engine)) == 2


def test_a_redrive_of_letters_from_before_a_purge_is_refused(
    shop_engine: sa.Engine, notify_server: InMemoryServer
) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["a"])
    die(Caller(url, "g", "i"), "t", 1, "boom")
    purge_all(shop_engine)
    consume(url, shop_engine)
    (item,) = redrive(url, "g")["items"]
    assert (item["status"], item["code"]) == BEFORE_INBOX
    flags = ("redrive", "g", "--max", "100", "--force", "--reason", "x", "--url", url, "--json")
    code, told = cli("dead-letter", *flags)
    assert code == 0 and [item["status"] for item in told["result"]["items"]] == [201]
    consume(url, shop_engine)
    assert len(items(shop_engine)) == 1


def test_messages_handled_before_the_inbox_are_not_redelivered_unasked(
    shop_engine: sa.Engine, notify_server: InMemoryServer
) -> None:
    url = notify_server.url
    subscribe(url, "g", "t")
    publish(url, "t", ["a"])
    without = Consumer(url, group="g")
    without.subscribe("t")(print)
    with running(without):
        eventually(lambda: lag(url, "g") == 0, "the message to be settled")
    consume(url, shop_engine)
    assert refusal(url, "POST", "groups/g/reset", **RESET) == BEFORE_INBOX


def test_a_letters_age_is_by_the_servers_clock(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    """A letter's age is by the server's clock: its id has the time of the producer, which may be hours behind."""
    url = notify_server.url
    notify_server.advance(7200)
    subscribe(url, "g", "t")
    publish(url, "t", ["handled without an inbox"])
    caller = Caller(url, "g", "i")
    assert caller.settle(caller.receive("t")) == [200]
    consume(url, shop_engine)
    post(url, "/v1/messages", {"messages": [{"topic": "t", "body": "young", "id": f"{new_id()}.0"}]})
    die(caller, "t", 1, "boom")
    assert [item["status"] for item in redrive(url, "g")["items"]] == [201]


def test_telling_takes_the_right_to_consume() -> None:
    with GuardedInMemory() as guarded:
        path, told = "/v1/admin/groups/g/subscriptions/t/inbox", {"whole_from": "1970-01-01T00:00:00Z"}
        subscribed = {"reason": REASON}
        own, other = guarded.make("consume:g@t"), guarded.make("consume:other@t")
        assert ask(guarded.url, "PUT", path.removesuffix("/inbox"), subscribed, own)[0] == 200
        assert ask(guarded.url, "PUT", path, told, own)[0] == 200
        assert ask(guarded.url, "PUT", path, told, other)[0] == 403
        assert ask(guarded.url, "PUT", path.replace("/t/", "/u/"), told, own)[0] == 403


def test_a_new_group_may_go_back_to_what_it_never_had(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    """A group that began at `latest` may be reset to the earliest message: it handled none of them."""
    url = notify_server.url
    publish(url, "t", ["a", "b"])
    assert consume(url, shop_engine) == 0
    admin(url, "POST", "groups/g/reset", RESET)
    assert consume(url, shop_engine) == 2


def test_a_start_before_a_purge_is_refused(shop_engine: sa.Engine, notify_server: InMemoryServer) -> None:
    """This happens to a group that was dropped, and in a database that another group's purge has emptied."""
    url = notify_server.url
    publish(url, "t", ["a"])
    purge_all(shop_engine)
    for _ in range(2):  # a second try is refused, too
        with pytest.raises(Conflict, match="with force") as raised:
            consumer_of(url, shop_engine, start="earliest").run(signals=False)
        assert raised.value.code == "before_inbox"
    flags = ("--start", "earliest", "--force", "--reason", "x", "--url", url, "--json")
    assert cli("group", "subscribe", "g", "t", *flags)[0] == 0
    assert consume(url, shop_engine, start="earliest") == 1
    assert consume(url, shop_engine, "other", start="latest") == 0, "a group that begins at the end is not concerned"


@pytest.mark.long
def test_a_reported_purge_survives_a_restart(shop_engine: sa.Engine, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        subscribe(server.url, "g", "t")
        publish(server.url, "t", ["a"])
        consume(server.url, shop_engine)
        purge_all(shop_engine)
        consume(server.url, shop_engine)
        told = whole_from(server.url)
        server.kill()
        server.start()
        assert whole_from(server.url) == told
        subscribe(server.url, "g", "t")  # changing the subscription forgets nothing
        assert refusal(server.url, "POST", "groups/g/reset", **RESET) == BEFORE_INBOX
    finally:
        server.stop()


def test_a_running_consumer_tells_of_a_purge(
    shop_engine: sa.Engine, notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running consumer notices that another process has purged the table."""
    monkeypatch.setattr("notify.client.consumer.inbox_maintenance.INBOX_LOOK_SECONDS", 0.02)
    url = notify_server.url
    with running(consumer_of(url, shop_engine), subscribed=True):
        before = eventually(lambda: whole_from(url), "the consumer to tell")
        assert before.startswith("1970")
        purge_all(shop_engine)
        eventually(lambda: whole_from(url) != before, "the consumer to tell of the purge")
        assert len(admin(url, "GET", "actions?max=100")["actions"]) == 0, "a consumer is no administrator"


# --- purging by itself --------------------------------------------------------------------------------------------


def fill(engine: sa.Engine, days: float, rows: int, group: str = "g") -> None:
    """Insert inbox rows of so many days ago."""
    with engine.begin() as connection:
        at = inboxes.instant_before(connection, days * DAY)
        connection.execute(
            notify_inbox.insert(),
            [{"consumer_group": group, "message_id": f"{days}-{n}", "created_at": at} for n in range(rows)],
        )


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox)) or 0


def test_old_rows_are_purged_by_the_consumer(
    shop_engine: sa.Engine, notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer tells the servers, and then purges old rows in batches; younger rows stay."""
    for name, value in (("INBOX_LOOK_SECONDS", 0.02), ("INBOX_PURGE_SECONDS", 0.02), ("INBOX_BATCH", 10)):
        monkeypatch.setattr(f"notify.client.consumer.inbox_maintenance.{name}", value)
    monkeypatch.setattr("notify.client.consumer.inbox_maintenance.INBOX_PAUSE_SECONDS", 0.0)
    fill(shop_engine, 31, 25)
    fill(shop_engine, 29, 5)
    url, deleted = notify_server.url, []
    delete = inboxes.delete_noted

    def noting(connection: sa.Connection, batch: int) -> int:
        told = whole_from(url)
        deleted.append((told is not None and not told.startswith("1970"), delete(connection, batch)))
        return deleted[-1][1]

    monkeypatch.setattr(inboxes, "delete_noted", noting)
    with running(consumer_of(url, shop_engine), subscribed=True):
        eventually(lambda: left(shop_engine) == 5, "the old rows to go")
        eventually(lambda: sum(count for _, count in deleted) == 25, "the last batch to return")
    assert deleted[:3] == [(True, 10), (True, 10), (True, 5)]


def test_purging_can_be_switched_off(
    shop_engine: sa.Engine, notify_server: InMemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("INBOX_LOOK_SECONDS", "INBOX_PURGE_SECONDS"):
        monkeypatch.setattr(f"notify.client.consumer.inbox_maintenance.{name}", 0.01)
    fill(shop_engine, 400, 3)
    looks, look = [], inboxes.whole_from
    monkeypatch.setattr(inboxes, "whole_from", lambda connection: (looks.append(1), look(connection))[1])
    consumer = Consumer(notify_server.url, group="g", inbox=Inbox(shop_engine, purge_after=None))
    consumer.subscribe("t")(lambda message, session: None)
    with running(consumer):
        eventually(lambda: len(looks) > 5, "some looks")
    assert left(shop_engine) == 3


def test_a_purge_keeps_other_replays_apart(shop_engine: sa.Engine) -> None:
    """A purge keeps the row of the same message in a younger replay."""
    fill(shop_engine, 40, 1)
    with shop_engine.begin() as connection:
        at = inboxes.instant_before(connection, 0)
        young = {"consumer_group": "g", "message_id": "40-0", "replay": 1, "created_at": at}
        connection.execute(notify_inbox.insert(), [young])
    assert Inbox(shop_engine).purge(30 * DAY) == 1
    with shop_engine.connect() as connection:
        assert list(connection.scalars(sa.select(notify_inbox.c.replay))) == [1]


def test_a_purge_within_a_day_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least"):
        Inbox(sa.create_engine("sqlite://"), purge_after=3600)
