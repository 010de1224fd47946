"""Delayed messages that are cancelled and replaced: by each producer, over HTTP, by administrators, and over kills."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from notify.client import (
    AsyncTransactionProducer,
    Consumer,
    Message,
    Reader,
    ReceivedMessage,
    TransactionProducer,
    WithdrawalOutcome,
    cancellation,
    replacement,
)
from notify.client.producer.packing import pack
from notify.errors import InvalidRequest, TransactionRefused
from notify.movers.relay.relay import Relay
from notify.movers.sinks.kafka import KafkaSink
from notify.protocol.keys import shard_of_key
from notify.protocol.large_bodies import ENCODING, ZSTD
from notify.protocol.wire import (
    BridgedTransaction,
    PackedMessage,
    PackedMessages,
    PackedPublished,
    PackedTransaction,
    PackedTransactions,
)
from notify.protocol.withdrawal import ANY_TOPIC, CANCELS, DEDUPE, KEEP, OWN, REPLACES
from notify.protocol.workers import worker_names
from notify.server.core.core import Core
from notify.server.settings import Settings
from notify.storage.memory import MemoryStore
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import bodies, drain, running, subscribe
from tests.support.http import admin, ask, post, refusal
from tests.support.shop import Order, Shop
from tests.support.transactions import new_id

NAMES = worker_names(2)
HOUR = 3600.0
WITHDRAWN, TOO_LATE, NOT_FOUND = WithdrawalOutcome.WITHDRAWN, WithdrawalOutcome.TOO_LATE, WithdrawalOutcome.NOT_FOUND


def texts(server: InMemoryServer, topic: str) -> list[str]:
    return sorted(m.text for m in server.messages(topic))


def test_they_share_the_fate_of_their_transaction(shop: Shop) -> None:
    producer, topic = shop.producer, shop.topic
    with shop.sessions.begin() as session:
        session.add(Order(item="a"))
        sent = [producer.send(session, Message(topic, text, delay=HOUR)) for text in ("kept", "dropped", "first")]
        kept, dropped, first = [message.id for message in sent]
    with shop.sessions.begin() as session:
        cancel = producer.cancel(session, dropped, topic=topic)
        replace = producer.replace(session, first, Message(topic, "second", delay=HOUR / 2))
        assert cancel.outcome(timeout=0) is WithdrawalOutcome.UNDECIDED
    with pytest.raises(ZeroDivisionError), shop.sessions.begin() as session:
        producer.cancel(session, kept, topic=topic)
        raise ZeroDivisionError
    assert (cancel.outcome(), replace.outcome()) == (WITHDRAWN, WITHDRAWN)
    shop.server.advance(HOUR + 1)
    eventually(lambda: texts(shop.server, topic) == ["kept", "second"], "what is left of them")
    with producer.transaction(shop.sessions()) as tx:
        late = tx.cancel(kept, topic=topic)
    assert late.outcome() is TOO_LATE
    assert producer.withdrawal(late.id).outcome() is TOO_LATE
    assert texts(shop.server, topic) == ["kept", "second"]


def test_an_outcome_is_known_without_the_server(shop: Shop) -> None:
    """Each waited ten seconds, the first one with the transaction's locks, and then a withdrawal that was rolled back
    was called UNDECIDED."""
    producer, target = shop.producer, f"{new_id()}.0"
    undecided, rolled_back = WithdrawalOutcome.UNDECIDED, WithdrawalOutcome.ROLLED_BACK
    with shop.server.down():  # whoever asks it gets an error
        with pytest.raises(ZeroDivisionError), shop.sessions.begin() as session:
            cancel = producer.cancel(session, target, topic=shop.topic)
            assert cancel.outcome() is undecided
            raise ZeroDivisionError
        with shop.engine.connect() as connection, pytest.raises(ZeroDivisionError):
            with producer.transaction(connection) as tx:
                replace = tx.replace(target, Message(shop.topic, "x"))
                raise ZeroDivisionError
        assert cancel.outcome() is replace.outcome() is rolled_back
        with shop.sessions() as session:
            cancel = producer.cancel(session, target, topic=shop.topic)
        assert cancel.outcome() is rolled_back, "closed without a commit"
    with shop.sessions() as session:
        with TransactionProducer(shop.server.url, group=shop.topic, engine=shop.engine) as closed:
            cancel = closed.cancel(session, target, topic=shop.topic)
        with pytest.raises(TransactionRefused):
            session.commit()
    assert cancel.outcome() is rolled_back, "its commit was refused"


def test_the_id_returned_by_send_is_enough_to_withdraw(shop: Shop) -> None:
    """Its id is that of the message, also after a savepoint was rolled back, and within the transaction itself."""
    with shop.sessions.begin() as session:
        first = shop.producer.send(session, Message(shop.topic, "first", delay=HOUR))
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            shop.producer.send(session, Message(shop.topic, "lost"))
            raise ZeroDivisionError
        second = shop.producer.send(session, Message(shop.topic, "second", key=lambda: 7))
        unnamed = shop.producer.cancel(session, first)
    assert second.key == "7" and unnamed.outcome() is WITHDRAWN
    assert [(m.id, m.text) for m in shop.server.messages(shop.topic)] == [(second.id, "second")]
    with shop.sessions.begin() as session:
        replace = shop.producer.replace(session, second, Message(shop.topic, "third"))
    assert replace.outcome() is TOO_LATE
    with shop.sessions() as session, pytest.raises(InvalidRequest, match="same topic"):
        shop.producer.replace(session, second, Message("another", "x"))
    for wrong in ("", "x", "0" * 36 + ".0"):
        with shop.sessions() as session, pytest.raises(InvalidRequest):
            shop.producer.cancel(session, wrong, topic=shop.topic)


def test_an_id_undone_by_a_savepoint_names_no_other_message(shop: Shop) -> None:
    """The next message of the transaction got its id: to cancel the one that was undone cancelled the other."""
    producer, topic = shop.producer, shop.topic
    with shop.sessions.begin() as session:
        kept = producer.send(session, Message(topic, "kept", delay=HOUR))
    with shop.sessions.begin() as session:
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            undone = producer.send(session, Message(topic, "undone", delay=HOUR))
            not_cancelled = producer.cancel(session, kept)
            raise ZeroDivisionError
        with pytest.raises(InvalidRequest, match="its savepoint was rolled back"):
            producer.cancel(session, undone)
        other = producer.send(session, Message(topic, "other", delay=HOUR))
        second = producer.replace(session, other, Message(topic, "second", delay=HOUR))
    assert not_cancelled.outcome() is WithdrawalOutcome.ROLLED_BACK and second.outcome() is WITHDRAWN
    for use in (lambda: undone.id, lambda: not_cancelled.id, lambda: cancellation(undone)):
        with pytest.raises(InvalidRequest, match="its savepoint was rolled back"):
            use()
    shop.server.advance(HOUR + 1)
    eventually(lambda: texts(shop.server, topic) == ["kept", "second"], "what is left of them")


def test_without_a_transaction_and_without_the_topic(memory: InMemoryServer, unique: str) -> None:
    with TransactionProducer(memory.url, group=unique) as producer:
        message = producer.publish(Message(unique, "x", delay=HOUR))
        other = producer.publish(Message(unique, "y", delay=HOUR))
        cancel = producer.publish(cancellation(message))
        prepared = producer.prepare([replacement(other, Message(unique, "z"))])
        asked = producer.withdrawal(f"{prepared.id}.0")
        assert asked.outcome(timeout=0) is WithdrawalOutcome.UNDECIDED
        prepared.commit()
        assert asked.outcome() is WITHDRAWN and producer.withdrawal(cancel).outcome() is WITHDRAWN
        never = producer.withdrawal(producer.publish(cancellation(f"{new_id()}.0", topic=unique)))
        assert never.outcome(timeout=0) is WithdrawalOutcome.WAITING
    assert texts(memory, unique) == ["z"]


def test_coroutines_cancel_and_replace(async_engine: AsyncEngine, memory: InMemoryServer, unique: str) -> None:
    async def scenario() -> None:
        engine = async_engine
        async with AsyncTransactionProducer(memory.url, group=unique, engine=engine) as producer:
            async with AsyncSession(engine) as session, session.begin():
                first = await producer.send(session, Message(unique, "first", delay=HOUR))
                other = await producer.send(session, Message(unique, "other", delay=HOUR))
            async with AsyncSession(engine) as session, session.begin():
                cancel = await producer.cancel(session, other.id, topic=unique)
                replace = await producer.replace(session, first, Message(unique, "second"))
            assert (await cancel.outcome(), await replace.outcome()) == (WITHDRAWN, WITHDRAWN)
            async with producer.transaction(AsyncSession(engine)) as tx:
                late = await tx.cancel(replace.id, topic=unique)
            assert await late.outcome() is TOO_LATE
            assert await producer.withdrawal(late.id).outcome() is TOO_LATE

    asyncio.run(scenario())
    assert texts(memory, unique) == ["second"]


def test_through_an_outbox_and_a_relay(emptied_shop: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    """The relay brings them as messages; also one whose message it brings only later."""

    def move() -> tuple[int, int]:
        done = asyncio.run(Relay(emptied_shop, memory.url).run(once=True))
        return done.sent, done.refused

    with TransactionProducer(memory.url, group=unique, engine=emptied_shop, mode="outbox") as producer:
        with Session(emptied_shop) as session, session.begin():
            dropped = producer.send(session, Message(unique, "dropped", delay=HOUR)).id
            first = producer.send(session, Message(unique, "first", delay=HOUR)).id
        with Session(emptied_shop) as session, session.begin():
            cancel = producer.cancel(session, dropped, topic=unique)
            replace = producer.replace(session, first, Message(unique, "second"))
        with pytest.raises(ZeroDivisionError), Session(emptied_shop) as session, session.begin():
            producer.cancel(session, replace.id, topic=unique)
            raise ZeroDivisionError
        assert cancel.outcome(timeout=0) is WithdrawalOutcome.UNDECIDED
        assert move() == (2, 0)
        assert (cancel.outcome(), replace.outcome()) == (WITHDRAWN, WITHDRAWN)
        early_id = new_id()
        early = producer.withdrawal(producer.publish(cancellation(f"{early_id}.0", topic=unique)))
        message = {"topic": unique, "body": "early", "delay": HOUR}
        half = {"id": early_id, "messages": [message], "committed": True}
        post(memory.url, "/v1/transactions", {"producer_group": unique, "transactions": [half]})
        assert early.outcome() is WITHDRAWN
    assert texts(memory, unique) == ["second"]


def test_a_withdrawal_over_http_is_carried_out_or_refused_with_a_code(memory: InMemoryServer, unique: str) -> None:
    def send(**fields: Any) -> dict[str, Any]:
        (item,) = post(memory.url, "/v1/messages", {"messages": [{"topic": unique, "body": ""} | fields]})["items"]
        return dict(item)

    message = send(body="x", delay=60)["id"]
    replace = send(body="y", headers={REPLACES: message})["id"]
    status, answer = ask(memory.url, "GET", f"/v1/withdrawals/{replace}")
    assert status == 200 and answer == {
        "id": replace, "withdraws": message, "topic": unique, "outcome": "WITHDRAWN", "replaces": True,
    }  # fmt: skip
    assert texts(memory, unique) == ["y"]
    refused = [
        send(headers={CANCELS: message}, body="x"),
        send(headers={CANCELS: message}, delay=5),
        send(headers={CANCELS: message, REPLACES: message}),
        send(headers={CANCELS: "x"}),
    ]
    assert [item["status"] for item in refused] == [422] * 4
    assert [item["code"] for item in refused] == ["invalid_withdrawal"] * 3 + ["invalid_id"]
    for wrong, code in ((message, "unknown_withdrawal"), ("x", "invalid_id")):
        assert ask(memory.url, "GET", f"/v1/withdrawals/{wrong}")[1]["code"] == code


def test_an_administrator_previews_a_withdrawal_before_it_is_carried_out(
    notify_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_URL", notify_server.url)
    url = notify_server.url
    with TransactionProducer(url, group=unique) as producer:
        message, other = (
            producer.publish(Message(unique, text, key="k", tag="v", headers={"h": "1"}, delay=HOUR)) for text in "ab"
        )
    path = f"topics/{unique}/messages/{message}"
    preview = admin(url, "POST", f"{path}/cancel", {"reason": "looked at", "dry_run": True})["result"]
    assert preview["standing"] == "delayed" and preview["due_at"] is not None
    assert admin(url, "GET", f"messages/{message}")["due_at"] == preview["due_at"]
    done = admin(url, "POST", f"{path}/replace", {"reason": "a wrong price", "body": "c", "delay": 0})["result"]
    assert done["outcome"] == "WITHDRAWN"
    status, shown = cli("message", "cancel", unique, other, "--reason", "paid", "--json")
    assert (status, shown["result"]["outcome"]) == (0, "WITHDRAWN")
    status, shown = cli("message", "cancel", unique, message, "--reason", "late", "--dry-run")
    assert status == 0 and "is withdrawn already" in shown["text"]
    status, shown = cli("message", "cancel", unique, message, "--reason", "late")
    assert status == 1 and "not done" in shown["text"], "a withdrawal that came too late looked like one that did not"
    assert refusal(url, "POST", f"topics/other/messages/{other}/cancel") == (404, "not_found")
    events = [e["event"] for e in admin(url, "GET", f"messages/{message}")["timeline"]]
    assert "withdrawn" in events
    (stored,) = notify_server.messages(unique)
    assert (stored.id, stored.text, stored.key, stored.tag) == (done["replacement"], "c", "k", "v")
    assert {a["what"] for a in admin(url, "GET", "actions")["actions"]} >= {"message.cancel", "message.replace"}
    status, text = ask(url, "GET", "/metrics")
    assert 'notify_withdrawals_total{outcome="WITHDRAWN"} 2.0' in str(text)


def test_a_replacement_has_the_headers_of_its_own_body(notify_server: InMemoryServer, unique: str) -> None:
    """An administrator's plain text said that it were compressed; a replaced message with a dedupe key was refused."""
    url = notify_server.url
    sent = {"topic": unique, "body": "x", "delay": 60, "headers": {ENCODING: ZSTD, DEDUPE: "k", "h": "1"}}
    (first,) = post(url, "/v1/messages", {"messages": [sent]})["items"]
    replace = {"reason": "a wrong price", "delay": 30}
    path = f"topics/{unique}/messages"
    second = admin(url, "POST", f"{path}/{first['id']}/replace", replace)["result"]["replacement"]
    third = admin(url, "POST", f"{path}/{second}/replace", replace | {"body": "new"})["result"]["replacement"]
    notify_server.advance(31)
    eventually(lambda: texts(notify_server, unique) == ["new"], "the replacement")
    with Reader(url) as reader:
        (message,) = reader.read(unique)
    assert (message.id, dict(message.headers)) == (third, {"h": "1"})


def test_a_lost_message_is_published_without_what_it_did(notify_server: InMemoryServer, unique: str) -> None:
    """Its dedupe key was refused without its delay; a replacement was taken, and not delivered."""
    url = notify_server.url
    lost, headers = {"topic": unique, "body_base64": "eA=="}, {DEDUPE: "k", KEEP: "last", "h": "1"}

    def republished(**fields: Any) -> tuple[int, str | None]:
        asked = {"reason": "lost", "messages": [lost | {"id": f"{new_id()}.0"} | fields]}
        (item,) = admin(url, "POST", "messages/republish", asked)["result"]["items"]
        return item["status"], item.get("code")

    def sent(body: str, **fields: Any) -> str:
        (item,) = post(url, "/v1/messages", {"messages": [{"topic": unique, "body": body} | fields]})["items"]
        return str(item["id"])

    assert republished(headers=headers) == (201, None)
    for target in (sent("released"), f"{new_id()}.0"):
        assert republished(headers={REPLACES: target}) == (422, "withdrawal_refused")
    by = {REPLACES: sent("first", delay=60)}
    assert republished(id=sent("by", delay=60, headers=by), headers=by) == (201, None)
    assert republished(headers={REPLACES: sent("late", delay=60)}) == (201, None)
    eventually(lambda: texts(notify_server, unique) == ["released", "x", "x", "x"], "what was published again")


def test_the_call_refuses_what_the_server_would(memory: InMemoryServer, unique: str) -> None:
    """An outbox's row would be committed, and land on the list of refused messages."""
    target = f"{new_id()}.0"
    wrong = [
        Message(unique, "x", headers={REPLACES: target}, dedupe="k", within=5),
        Message(unique, "x", headers={CANCELS: target}),
        Message(unique, "", headers={CANCELS: target}, delay=5),
        Message(unique, "", headers={CANCELS: "x"}),
        Message(unique, "", headers={CANCELS: target, REPLACES: target}),
        Message(unique, "x", headers={DEDUPE: "k"}),
        Message(unique, "x", headers={DEDUPE: "k", KEEP: "both"}, delay=5),
        Message(ANY_TOPIC, "x", headers={REPLACES: target}),
    ]
    for message in wrong:
        with pytest.raises(InvalidRequest):
            pack(message)
        headers = dict(message.headers) | ({DEDUPE: "k"} if message.dedupe else {})
        fields = {"topic": message.topic, "body": message.body, "headers": headers}
        fields |= {"delay": message.delay or message.within}
        (item,) = post(memory.url, "/v1/messages", {"messages": [fields]})["items"]
        assert item["status"] == 422, message


def test_a_cancellation_waits_for_no_room(notify_server: InMemoryServer, unique: str) -> None:
    url = notify_server.url
    with TransactionProducer(url, group=unique) as producer:
        sent = producer.publish(Message(unique, "later", delay=HOUR))
        admin(url, "PUT", f"topics/{unique}", {"backlog": 1, "backlog_policy": "refuse"})
        subscribe(url, unique, unique)
        producer.publish(Message(unique, "fills it"))
        full = [{"topic": unique, "body": "x"}, {"topic": unique, "body": "", "headers": {CANCELS: sent}}]
        answered = [post(url, "/v1/messages", {"messages": [one]})["items"][0] for one in full]
        assert [item["status"] for item in answered] == [429, 201]
        assert producer.withdrawal(answered[1]["id"]).outcome() is WITHDRAWN


def test_they_outlast_a_kill(killed_server: ServerProcess, unique: str) -> None:
    """A withdrawn message stays so, and a withdrawal that waits for its message waits on, over kills of the server."""
    server = killed_server
    subscribe(server.url, unique, unique, start="earliest")
    with TransactionProducer(server.url, group=unique, answer_checks=False) as producer:
        dropped, first = (producer.publish(Message(unique, text, delay=600)) for text in ("dropped", "first"))
        undecided = producer.prepare([Message(unique, "undecided", delay=600)])
        cancels = [producer.publish(cancellation(m, topic=unique)) for m in (dropped, f"{undecided.id}.0")]
        replace = producer.publish(replacement(first, Message(unique, "second")))
        server.kill()
        server.start()
        outcomes = [producer.withdrawal(m).outcome(timeout=0) for m in (*cancels, replace)]
        assert outcomes == [WITHDRAWN, WithdrawalOutcome.WAITING, WITHDRAWN]
        undecided.commit()
        assert producer.withdrawal(cancels[1]).outcome() is WITHDRAWN
        server.kill()
        server.start()
        last = producer.publish(Message(unique, "last", delay=2))
        assert bodies(drain(server.url, unique, unique, 2)) == ["second", "last"]
        assert producer.withdrawal(producer.publish(cancellation(last, topic=unique))).outcome() is TOO_LATE


def test_kafka_refuses_them_with_what_to_do(tmp_path: Path) -> None:
    """A server in front of Kafka before the commit; a bridge or relay by its list of refused messages."""
    message = PackedMessage(topic="t", body=b"", headers={CANCELS: f"{new_id()}.0"})
    with pytest.raises(InvalidRequest, match="look in the database"):
        KafkaSink("kafka://127.0.0.1:9")._record(
            BridgedTransaction(id=new_id(), producer_group="g", messages=[message]), 0, now_us=0
        )

    async def scenario(**settings: Any) -> tuple[int, str | None]:
        core = Core(MemoryStore(), Settings(data_dir=str(tmp_path), **settings))
        half = PackedTransaction(id=new_id(), messages=[message])
        (item,) = await core.transactions.put(PackedTransactions(producer_group="g", transactions=[half]))
        return item.status, item.code

    assert asyncio.run(scenario(kafka="kafka://127.0.0.1:9")) == (422, "withdrawal_refused")
    assert asyncio.run(scenario(workers=2)) == (422, "withdrawal_refused")
    assert asyncio.run(scenario()) == (201, None)


def test_a_worker_refuses_what_another_one_would_have_to_decide(tmp_path: Path) -> None:
    """A transaction goes to the worker of its first key; a withdrawal or dedupe key of another worker found nothing."""
    here, there = (next(k for k in map(str, range(1000)) if shard_of_key(k, NAMES) == name) for name in NAMES)
    core = Core(MemoryStore(), Settings(data_dir=str(tmp_path), workers=2, shard=NAMES[0]))

    async def put(*messages: PackedMessage, id: str = "", committed: bool = False) -> tuple[int, str | None]:
        half = PackedTransaction(id=id or new_id(), messages=list(messages), committed=committed)
        (item,) = await core.transactions.put(PackedTransactions(producer_group="g", transactions=[half]))
        return item.status, item.code

    async def scenario() -> None:
        paid = PackedMessage(topic="paid", body=b"", key=here)
        refused = 422, "withdrawal_refused"
        cancel = PackedMessage(topic="t", body=b"", key=there, headers={CANCELS: f"{new_id()}.0"})
        deduped = PackedMessage(topic="t", body=b"", key=there, headers={DEDUPE: "k"}, delay=60)
        assert await put(paid, cancel) == refused and await put(paid, deduped) == refused
        assert await put(paid, cancel, committed=True) == (201, None)  # a relay brings all keys to one worker
        for one in (cancel, deduped):
            one.key = here
            assert await put(paid, one) == (201, None)
        sent_here, both = new_id(), new_id()
        delayed = PackedMessage(topic="t", body=b"", key=there, delay=60)
        assert await put(paid, delayed, id=sent_here) == (201, None)
        cancel = PackedMessage(topic="t", body=b"", key=there, headers={CANCELS: f"{sent_here}.1"})
        assert await put(paid, cancel) == (201, None)
        cancel = PackedMessage(topic="t", body=b"", key=there, headers={CANCELS: f"{both}.1"})
        assert await put(paid, delayed, cancel, id=both) == (201, None)

    asyncio.run(scenario())


def test_the_first_key_of_a_transaction_names_the_worker_of_its_messages(shop: Shop) -> None:
    with shop.sessions.begin() as session:
        shop.producer.send(session, Message(shop.topic, "paid", key=lambda: "first"))
        sent = shop.producer.send(session, Message(shop.topic, "later", key="second", delay=HOUR))
    assert (sent.key, sent.place_key, cancellation(sent).key) == ("second", "first", "first")
    assert cancellation(sent, key="given").key == "given"


def test_nothing_is_known_of_strangers(memory: InMemoryServer, unique: str) -> None:
    """A withdrawal that names another topic than its message's finds nothing."""
    with TransactionProducer(memory.url, group=unique) as producer:
        message = producer.publish(Message(unique, "x", delay=HOUR))
        foreign = producer.publish(cancellation(message, topic=unique + "-other"))
        assert producer.withdrawal(foreign).outcome() is NOT_FOUND
    memory.advance(HOUR + 1)
    assert texts(memory, unique) == ["x"]


def test_a_handler_may_send_the_headers_of_its_message_on(memory: InMemoryServer, unique: str) -> None:
    """Its own message would be a withdrawal of one that is gone, or collapse, and nobody would get it."""
    follow = unique + "-follow"
    with TransactionProducer(memory.url, group=unique) as producer:
        first = producer.publish(Message(unique, "first", delay=HOUR))
        producer.publish(replacement(first, Message(unique, "replacement", headers={"kept": "1"})))
        for keep in ("first", "last"):
            producer.publish(Message(unique, keep, dedupe=keep, within=60, keep=keep))  # type: ignore[arg-type]
        memory.advance(61)
        consumer = Consumer(memory.url, group=unique)

        @consumer.subscribe(unique, start="earliest")
        def send_on(message: ReceivedMessage) -> None:
            producer.publish(Message(follow, message.body, headers=message.headers))

        with running(consumer):
            eventually(lambda: texts(memory, follow) == ["first", "last", "replacement"], "what the handler sent")
    with Reader(memory.url) as reader:
        headers = [dict(message.headers) for message in reader.read(unique)]
    assert all(OWN.isdisjoint(names) for names in headers) and sum("kept" in names for names in headers) == 1


def test_only_messages_with_a_dedupe_key_ask_whether_there_is_room_for_one(tmp_path: Path) -> None:
    """At the bound the answer looks at 100,000 keys: every transaction of every producer paid for it."""
    core = Core(MemoryStore(), Settings(data_dir=str(tmp_path)))
    asked: list[bool] = []
    core.queues.is_full_of_keys = lambda: asked.append(True) or True  # type: ignore[method-assign,func-returns-value]

    async def scenario() -> None:
        plain = PackedMessage(topic="t", body=b"")
        keyed = PackedMessage(topic="t", body=b"", headers={DEDUPE: "k"}, delay=60)
        for message, expected in ((plain, (201, None)), (keyed, (429, "too_many_keys"))):
            half = PackedTransaction(id=new_id(), messages=[message])
            (item,) = await core.transactions.put(PackedTransactions(producer_group="g", transactions=[half]))
            (published,) = await core.transactions.publish(
                PackedMessages(messages=[PackedPublished(**asdict(message))])
            )
            assert (item.status, item.code) == (published.status, published.code) == expected

    asyncio.run(scenario())
    assert len(asked) == 2


def test_one_message_of_a_key_is_pending(shop: Shop) -> None:
    producer, topic = shop.producer, shop.topic
    for number in range(3):
        with shop.sessions.begin() as session:
            producer.send(session, Message(topic, f"first {number}", dedupe="user-7", within=60))
            producer.send(session, Message(topic, f"last {number}", dedupe=8, within=60, keep="last"))
        eventually(lambda: not shop.server.halves(topic), "the outcome of the half")
    wrong = [
        {"dedupe": "x"},
        {"within": 5},
        {"dedupe": "x", "within": 5, "delay": 5},
        {"dedupe": "x" * 256, "within": 5},
    ]
    for fields in wrong:
        with pytest.raises(InvalidRequest):
            producer.publish(Message(topic, "x", **fields))  # type: ignore[arg-type]
    shop.server.advance(61)
    assert texts(shop.server, topic) == ["first 0", "last 2"]
    assert "notify_collapsed_total" in str(ask(shop.server.url, "GET", "/metrics")[1])
