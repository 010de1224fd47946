"""`notify serve --workers 2`: one port, two logs, each key in one of them; workers that die, and a parent that does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from notify.check.listener import CheckMessageListener, HalfMessage, Outcome
from notify.client import Consumer, Inbox, Message, ReceivedMessage, TransactionProducer
from notify.client.consumer.reader import Reader
from notify.client.producer.transactions import TransactionClient
from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest, Unavailable
from notify.movers.sinks.queue_server import QueueSink
from notify.protocol.keys import shard_of_key
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from notify.protocol.workers import check_count, worker_names
from notify.testing.process import ServerProcess
from tests.support.authority import Authority
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.groups import is_subscribed, lag, running, subscribe
from tests.support.http import admin, ask, call, post, refusal
from tests.support.servers import process_of, stop_if_running
from tests.support.shop import Order, items
from tests.support.transactions import half_request, new_id

NAMES = worker_names(2)


def keys_of(worker: str, count: int = 3) -> list[str]:
    """So many keys that belong to a worker."""
    return [key for key in map(str, range(1000)) if shard_of_key(key, NAMES) == worker][:count]


KEYS = [key for name in NAMES for key in keys_of(name)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("workers")
    made = ServerProcess(directory / "data", flags=["--workers", "2"]).start()
    try:
        yield made
    finally:
        stop_if_running(made)


def stored(url: str, topic: str) -> dict[str, list[dict[str, Any]]]:
    """The messages of a topic in the order of each worker's log, by worker."""
    logs = {}
    for name in NAMES:
        status, answer = ask(url, "GET", f"/{name}/v1/topics/{topic}/queues/0/messages?max=10000")
        logs[name] = answer["messages"] if status == 200 else []
    return logs


class Sending:
    """Sends 0, 1, 2, … for each key, in a thread for each; a message that may not have been stored is sent again."""

    def __init__(self, url: str, topic: str, keys: Sequence[str], count: int) -> None:
        self.sent = dict.fromkeys(keys, 0)
        self._producer = TransactionProducer(url, group="orders")
        self._threads = [threading.Thread(target=self._send, args=(topic, key, count)) for key in keys]

    def _send(self, topic: str, key: str, count: int) -> None:
        for n in range(count):
            while True:
                try:
                    prepared = self._producer.prepare([Message(topic, {"n": n}, key=key)])
                    break
                except Unavailable:
                    continue
            while True:
                try:
                    prepared.commit()
                    break
                except Unavailable:
                    continue
            self.sent[key] = n + 1

    def __enter__(self) -> Sending:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()
        self._producer.close()


class Received:
    """A consumer, and the numbers that it was given for each key, in their order."""

    def __init__(self, url: str, group: str, topic: str, mode: Any = "ordered") -> None:
        self.consumer = Consumer(url, group=group)
        self.numbers: dict[str, list[int]] = defaultdict(list)

        @self.consumer.subscribe(topic, mode=mode, start="earliest")
        def handle(message: ReceivedMessage) -> None:
            assert message.key is not None
            self.numbers[message.key].append(message.json()["n"])

    def count(self) -> int:
        return sum(map(len, self.numbers.values()))


@pytest.mark.long
def test_each_key_is_in_one_log_in_order_and_a_consumer_reads_all(server: ServerProcess) -> None:
    received = Received(server.url, "all", "divided")
    with running(received.consumer), Sending(server.url, "divided", KEYS, 20):
        eventually(lambda: received.count() >= 20 * len(KEYS), "every message")
    assert received.numbers == {key: list(range(20)) for key in KEYS}
    for name, messages in stored(server.url, "divided").items():
        assert {m["key"] for m in messages} == set(keys_of(name))


@pytest.mark.long
def test_sessions_of_several_threads_send_to_both_workers(server: ServerProcess, sqlite_engine: sa.Engine) -> None:
    """Each local row names the worker that has its half, and each effect happens once."""
    engine = sqlite_engine
    sessions = sessionmaker(engine)
    producer = TransactionProducer(server.url, group="shop", engine=engine, half_timeout=PATIENCE_SECONDS)
    consumer = Consumer(server.url, group="effects", inbox=Inbox(engine))

    @consumer.subscribe("ordered", start="earliest")
    def handle(message: ReceivedMessage, session: Session) -> None:
        session.add(Order(item=f"effect of {message.key}"))

    def order(key: str) -> None:
        for _ in range(5):
            with sessions.begin() as session:
                session.add(Order(item=key))
                producer.send(session, Message("ordered", {}, key=key))

    threads = [threading.Thread(target=order, args=(key,)) for key in KEYS]
    with running(consumer):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.close()
        eventually(lambda: len(items(engine)) == 2 * 5 * len(KEYS), "every effect")
    assert Counter(items(engine)) == Counter([*KEYS, *(f"effect of {key}" for key in KEYS)] * 5)
    with engine.connect() as connection:
        places = {(row.key, row.shards) for row in connection.execute(sa.select(half_message))}
    assert places == {(key, name) for name in NAMES for key in keys_of(name)}


def test_a_start_at_an_offset_is_refused(server: ServerProcess) -> None:
    """It would leave out messages of each worker."""
    consumer = Consumer(server.url, group="at-offset")
    consumer.subscribe("at-offset", start=3)(lambda message: None)
    with pytest.raises(InvalidRequest, match="each of worker-1, worker-2 has offsets of its own"):
        consumer.run()


def test_large_requests_without_keys_are_divided(server: ServerProcess) -> None:
    async def send() -> None:
        client = TransactionClient(server.url, "orders", instance="i")
        try:
            for _ in range(4):  # each goes into requests of its own
                await asyncio.gather(*(client.publish(PackedMessage(topic="unkeyed", body=b"")) for _ in range(250)))
        finally:
            await client.close()

    asyncio.run(send())
    first, second = map(len, stored(server.url, "unkeyed").values())
    assert first + second == 1000
    assert min(first, second) >= 100


def test_a_check_finds_the_producer_whichever_worker_has_the_half(server: ServerProcess) -> None:
    class Committed(CheckMessageListener):
        topics = ("checked",)

        def check(self, half: HalfMessage) -> Outcome:
            return Outcome.COMMIT

    with TransactionProducer(server.url, group="checks", check_after=1) as producer:
        producer.add_check_listener(Committed())
        for key in KEYS:
            producer.prepare([Message("checked", b"", key=key)])
        eventually(lambda: [len(m) for m in stored(server.url, "checked").values()] == [3, 3], "the answers to checks")


def test_a_key_at_the_wrong_worker_is_refused_with_the_right_one(server: ServerProcess) -> None:
    key = keys_of("worker-2")[0]
    request = half_request(key=key)
    (item,) = post(server.url, "/worker-1/v1/transactions", request)["items"]
    assert (item["status"], item["code"], item["shard"]) == (421, "wrong_shard", "worker-2")
    (item,) = post(server.url, f"/{item['shard']}/v1/transactions", request)["items"]
    assert (item["status"], item["shard"]) == (201, "worker-2")
    request["transactions"][0] |= {"id": new_id(), "committed": True}  # a relay's, which sends all to one worker
    (item,) = post(server.url, "/worker-1/v1/transactions", request)["items"]
    assert (item["status"], item["shard"]) == (201, "worker-1")
    (item,) = post(server.url, "/worker-1/v1/messages", {"messages": [{"topic": "t", "body": "", "key": key}]})["items"]
    assert (item["status"], item["shard"]) == (421, "worker-2")


def test_a_mover_must_name_its_worker(server: ServerProcess) -> None:
    """Another worker knows neither its position nor its ids, and would store all of it again."""
    relayed = half_request(key=KEYS[0])
    relayed["transactions"][0]["committed"] = True
    batch = {"epoch": 1, "expected_position": "", "position": "", "claim": True, "transactions": []}
    published = {"messages": [{"topic": "t", "body": "", "key": KEYS[0]}], "anywhere": True}
    for method, path, body in (
        ("POST", "/v1/transactions", relayed),
        ("POST", "/v1/messages", published),
        ("GET", "/v1/bridge/shop", None),
        ("POST", "/v1/bridge/shop/batches", batch),
    ):
        status, answer = ask(server.url, method, path, body)
        assert (status, answer["code"]) == (421, "names_no_worker"), (method, path, answer)
        status, answer = ask(server.url, method, f"/worker-2{path}", body)
        assert status == 200, (method, path, answer)


@pytest.mark.parametrize("named", ["", "/worker-2"])
def test_a_sink_keeps_to_one_worker(server: ServerProcess, named: str) -> None:
    """At the port it is the first one; there the keys of all are, in the order in which they were moved."""
    topic, shard = ("moved-2", "worker-2") if named else ("moved", "worker-1")

    async def move() -> None:
        sink = QueueSink(server.url + named)
        try:
            epoch, _ = await sink.claim(topic)
            for n, key in enumerate(KEYS):
                message = PackedMessage(topic=topic, body=b"", key=key)
                sent = [BridgedTransaction(id=new_id(), producer_group=g, messages=[message]) for g in ("shop", "")]
                assert [item.status for item in await sink.put(sent)] == [201, 201]
                bridged = BridgedTransaction(id=new_id(), producer_group="shop", messages=[message])
                batch = PackedBridgeBatch(
                    epoch=epoch, expected_position=str(n or ""), position=str(n + 1), transactions=[bridged]
                )
                assert (await sink.append(topic, batch)).stored == 1
            assert await sink.position(topic) == str(len(KEYS))
        finally:
            await sink.close()

    asyncio.run(move())
    lengths = {name: len(messages) for name, messages in stored(server.url, topic).items()}
    assert lengths == dict.fromkeys(NAMES, 0) | {shard: 3 * len(KEYS)}


def test_a_connection_belongs_to_one_worker(server: ServerProcess) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(60)
        for path in ("/worker-2/v1/limits", "/worker-1/v1/limits"):
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200" if "2" in path else b"HTTP/1.1 421"), answer


def test_a_request_that_comes_byte_by_byte_finds_its_worker(server: ServerProcess) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(60)
        for byte in b"GET /worker-2/readyz HTTP/1.1\r\nhost: localhost\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert b'"shard":"worker-2"' in connection.recv(65536)


def test_topics_and_groups_are_made_and_shown_at_all_workers(server: ServerProcess) -> None:
    admin(server.url, "PUT", "topics/made", {"ttl": 3600.0})
    subscribe(server.url, "made", "made")
    for name in NAMES:
        assert call(server.url, "GET", f"/{name}/v1/admin/topics/made")["ttl"] == 3600
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("made", b"", key=key))
    assert lag(server.url, "made") == len(KEYS)
    (row,) = [row for row in admin(server.url, "GET", "groups")["groups"] if row["name"] == "made"]
    assert row["lag"] == len(KEYS)
    found = admin(server.url, "GET", "messages?topic=made&newest=true&max=4")
    rest = admin(server.url, "GET", f"messages?topic=made&newest=true&max=4&before={found['next']}")
    assert sorted(m["key"] for m in found["messages"] + rest["messages"]) == sorted(KEYS)
    moved = admin(server.url, "POST", "groups/made/reset", {"topic": "made", "to": "latest"})
    assert sum(queue["left_out"] for queue in moved["result"]["queues"]) == len(KEYS)
    assert lag(server.url, "made") == 0
    assert refusal(server.url, "POST", "groups/made/reset", topic="made", to=0) == (422, "names_no_worker")
    admin(server.url, "DELETE", "topics/made", {})
    assert [ask(server.url, "GET", f"/{name}/v1/admin/topics/made")[0] for name in NAMES] == [404, 404]


def test_a_write_that_one_worker_refuses_is_done_by_none(server: ServerProcess) -> None:
    key = keys_of("worker-2")[0]
    subscribe(server.url, "behind", "bounded")
    post(server.url, "/worker-2/v1/messages", {"messages": [{"topic": "bounded", "body": "", "key": key}] * 2})
    assert refusal(server.url, "PUT", "topics/bounded", backlog=1) == (422, "backlog_below_stored")
    assert admin(server.url, "GET", "topics/bounded")["backlog"] == 0
    assert call(server.url, "GET", "/worker-1/v1/admin/topics/bounded")["backlog"] == 0


def test_an_action_reaches_the_worker_that_knows_the_transaction(server: ServerProcess) -> None:
    for name in NAMES:
        request = half_request(transaction_id=new_id(), topic="forced", key=keys_of(name)[0])
        post(server.url, f"/{name}/v1/transactions", request)
        (transaction,) = [t["id"] for t in request["transactions"]]
        assert admin(server.url, "GET", f"transactions/{transaction}")["shard"] == name
        admin(server.url, "POST", f"transactions/{transaction}/commit", {})
        (life,) = admin(server.url, "GET", f"messages?id={transaction}.0")["messages"]
        assert life["message"]["topic"] == "forced"
    assert [len(messages) for messages in stored(server.url, "forced").values()] == [1, 1]
    assert refusal(server.url, "GET", f"transactions/{new_id()}") == (404, "not_found")


def test_transactions_of_all_workers_are_decided_at_once(server: ServerProcess) -> None:
    waiting = [new_id() for _ in NAMES]
    for name, transaction in zip(NAMES, waiting, strict=True):
        half = half_request("at-once", transaction, topic="at-once", key=keys_of(name)[0])
        post(server.url, f"/{name}/v1/transactions", half)
    chosen = {"ids": [*waiting, new_id()]}
    dry = admin(server.url, "POST", "transactions/commit", chosen | {"dry_run": True})["result"]
    assert (dry["count"], dry["left_out"], dry["messages"]) == (2, 1, 2)
    assert dry["producer_groups"] == {"at-once": 2} and dry["topics"][0]["messages"] == 2
    theirs = {"all": True, "wanted": {"producer_group": "at-once"}}
    jobs = admin(server.url, "POST", "transactions/check", theirs)["result"]["jobs"]
    assert len(jobs) == 2
    for job in jobs:
        eventually(lambda job=job: admin(server.url, "GET", f"jobs/{job}")["state"] == "done", "the job's end")  # type: ignore[misc]
    items = admin(server.url, "POST", "transactions/rollback", chosen)["result"]["items"]
    assert sorted(item["status"] for item in items) == [200, 200, 404]
    assert {admin(server.url, "GET", f"transactions/{name}")["state"] for name in waiting} == {"ROLLED_BACK"}


def test_dead_letters_of_all_workers_are_listed_and_sent_again(server: ServerProcess) -> None:
    subscribe(server.url, "grave", "dying")
    for name in NAMES:
        key = keys_of(name)[0]
        post(server.url, f"/{name}/v1/messages", {"messages": [{"topic": "dying", "body": "b", "key": key}]})
        answer = post(server.url, f"/{name}/v1/groups/grave/receive", {"instance": "me", "max": 1, "wait": 30})
        items = [{"receipt": m["receipt"], "action": "dead_letter", "reason": "no"} for m in answer["messages"]]
        assert len(items) == 1
        post(server.url, f"/{name}/v1/groups/grave/settle", {"items": items})
    letters = admin(server.url, "GET", "groups/grave/dead-letters")["messages"]
    assert {letter["worker"] for letter in letters} == set(NAMES)
    code, ended = cli("dead-letter", "redrive", "grave", "--all", "--reason", "r", "--url", server.url, "--json")
    assert (code, [job["done"] for job in ended["jobs"]]) == (0, [1, 1]), ended
    assert lag(server.url, "grave") == 2


def test_held_keys_of_all_workers_are_decided_about(server: ServerProcess) -> None:
    """Each worker holds its own; at the port they are one list."""
    url, mended = server.url, threading.Event()
    handled: dict[str, list[int]] = defaultdict(list)
    consumer = Consumer(url, group="holding")

    @consumer.subscribe("held", mode="ordered", start="earliest", max_attempts=1, on_exhausted="hold")
    def handle(message: ReceivedMessage) -> None:
        assert message.key is not None
        number = message.json()["n"]
        if number == 0 and not mended.is_set():
            raise LookupError("no such account")
        handled[message.key].append(number)

    def listed() -> dict[str, dict[str, Any]]:
        return {row["key"]: row for row in admin(url, "GET", "groups/holding/held-keys")["held"]}

    with TransactionProducer(url, group="orders") as producer, running(consumer):
        for n in range(2):
            for key in KEYS:
                producer.publish(Message("held", {"n": n}, key=key))
        eventually(lambda: is_subscribed(url, "holding") and listed().keys() == set(KEYS), "all keys to be held")
        rows = listed()
        assert {rows[key]["worker"] for key in KEYS} == set(NAMES) and handled == {}
        skipped = [KEYS[0], KEYS[-1]]
        mended.set()
        body = {"ids": [rows[key]["id"] for key in skipped], "reason": "booked by hand"}
        items = admin(url, "POST", "groups/holding/held-keys/skip", body)["result"]["items"]
        assert sorted((item["key"], item["status"]) for item in items) == sorted((key, 200) for key in skipped)
        admin(url, "POST", "groups/holding/held-keys/release", {"all": True, "reason": "the accounts exist"})
        wanted = {key: [1] if key in skipped else [0, 1] for key in KEYS}
        eventually(lambda: handled == wanted, "all keys to continue")
    assert listed() == {} and len(admin(url, "GET", "groups/holding/dead-letters")["messages"]) == 2


def test_a_redrive_takes_at_most_max_letters_of_all_workers_together(server: ServerProcess) -> None:
    subscribe(server.url, "bounded-grave", "dying-in-bounds")
    for name in NAMES:
        key = keys_of(name)[0]
        messages = [{"topic": "dying-in-bounds", "body": "b", "key": key}] * 3
        post(server.url, f"/{name}/v1/messages", {"messages": messages})
        answer = post(server.url, f"/{name}/v1/groups/bounded-grave/receive", {"instance": "me", "max": 3, "wait": 30})
        items = [{"receipt": m["receipt"], "action": "dead_letter", "reason": "no"} for m in answer["messages"]]
        assert len(items) == 3
        post(server.url, f"/{name}/v1/groups/bounded-grave/settle", {"items": items})
    path = "groups/bounded-grave/dead-letters/redrive"
    cut = admin(server.url, "POST", path, {"max": 1, "dry_run": True})["result"]
    rest = admin(server.url, "POST", path, {"max": 9, "dry_run": True, "offset": cut["next_offset"]})["result"]
    assert (len(cut["ids"]), len(rest["ids"]), rest["next_offset"]) == (1, 5, 0)
    assert refusal(server.url, "POST", path, offset=3) == (422, "names_no_worker")
    shown = admin(server.url, "POST", path, {"max": 4, "dry_run": True})["result"]["ids"]
    sent = admin(server.url, "POST", path, {"max": 4})["result"]["items"]
    assert len(shown) == 4 and [item["id"] for item in sent] == shown
    assert [item["status"] for item in sent] == [201] * 4
    assert lag(server.url, "bounded-grave") == 4
    rest = admin(server.url, "POST", path, {"max": 1000})["result"]["items"]
    assert [item["status"] for item in rest] == [201, 201]
    assert admin(server.url, "POST", path, {})["result"]["items"] == []
    assert refusal(server.url, "POST", path, max=0)[0] == 422


@pytest.mark.parametrize("logs", [["log"], ["worker-1/log", "worker-2/log"]])
def test_a_log_that_cannot_be_made_is_said_in_a_sentence(tmp_path: Path, logs: list[str]) -> None:
    """With what to do, and without a traceback."""
    for log in logs:
        (tmp_path / log).parent.mkdir(exist_ok=True)
        (tmp_path / log).touch()
    broken = ServerProcess(tmp_path, flags=["--workers", str(len(logs))])
    with pytest.raises(Unavailable) as refused:
        broken.start()
    said = str(refused.value)
    assert "Traceback" not in said
    # Whichever of them says so first.
    assert any(f"the data directory {(tmp_path / log).parent}" in said for log in logs)
    assert "or choose another --data-dir" in said


def test_a_message_that_an_operator_sends_finds_the_worker_of_its_key(server: ServerProcess) -> None:
    """Also where the topic is at the other worker alone, and not where it is at none."""
    first, second = (keys_of(name)[0] for name in NAMES)
    post(server.url, "/worker-1/v1/messages", {"messages": [{"topic": "by-operator", "body": "", "key": first}]})
    sent = admin(server.url, "POST", "topics/by-operator/messages", {"body": "b", "key": second})
    assert sent["result"]["items"][0]["status"] == 201
    assert [len(messages) for messages in stored(server.url, "by-operator").values()] == [1, 1]
    assert refusal(server.url, "POST", "topics/mistyped/messages", body="b", key=second) == (404, "not_found")


def test_a_message_that_an_audit_found_lost_is_published_by_one_worker(server: ServerProcess) -> None:
    """By that of its key, however often; and by none where any of them has it in a queue."""
    key = keys_of("worker-2")[0]
    message = {"topic": "mended", "body_base64": "eA=="}
    there = post(server.url, "/worker-2/v1/messages", {"messages": [{"topic": "mended", "body": "", "key": key}]})
    lost = [
        message | {"id": f"{new_id()}.0", "key": key},
        message | {"id": there["items"][0]["id"], "key": keys_of("worker-1")[0]},
        message | {"id": f"{new_id()}.0"},
    ]
    for expected in ([201, 409, 201], [200, 409, 200]):
        items = admin(server.url, "POST", "messages/republish", {"messages": lost})["result"]["items"]
        assert [item["id"] for item in items] == [m["id"] for m in lost]
        assert [item["status"] for item in items] == expected
    logs = stored(server.url, "mended")
    assert sum(map(len, logs.values())) == 3
    assert [m["key"] for m in logs["worker-2"] if "key" in m] == [key, key]
    dry = admin(server.url, "POST", "messages/republish", {"messages": lost, "dry_run": True})["result"]["items"]
    assert [item.get("status") for item in dry] == [None, 409, None]


def test_a_purge_up_to_an_offset_names_its_worker(server: ServerProcess) -> None:
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("purged", b"", key=key))
    assert refusal(server.url, "POST", "topics/purged/purge", before=1) == (422, "names_no_worker")
    assert [len(messages) for messages in stored(server.url, "purged").values()] == [3, 3]


def test_commands_mean_all_workers(server: ServerProcess) -> None:
    code, answer = cli("topic", "create", "by-hand", "--reason", "r", "--url", server.url)
    assert code == 0, answer
    assert [ask(server.url, "GET", f"/{name}/v1/admin/topics/by-hand")[0] for name in NAMES] == [200, 200]


@pytest.mark.long
def test_doctor_names_a_worker_that_hangs(server: ServerProcess) -> None:
    """It waits for its answer as long as any read does; what is left out of the others' answers is not called fine."""
    hanging = process_of(server, "worker-2")
    os.kill(hanging, signal.SIGSTOP)
    try:
        code, answer = cli("doctor", "--url", server.url, "--json")
        assert code == 1 and answer["findings"][0].startswith("worker-2 does not answer"), answer
        _, text = ask(server.url, "GET", "/metrics")
        assert 'notify_topics{worker="worker-1"}' in text and 'worker="worker-2"' not in text
    finally:
        os.kill(hanging, signal.SIGCONT)


def test_a_page_does_not_wait_long_for_a_worker_that_hangs(server: ServerProcess) -> None:
    """Its menu counts what waits at all workers."""
    hanging = process_of(server, "worker-2")
    os.kill(hanging, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        status, text = ask(server.url, "GET", "/settings", headers={"accept": "text/html"})
        assert status == 200 and "Settings" in text and time.monotonic() - begin < 5
    finally:
        os.kill(hanging, signal.SIGCONT)


def test_a_tail_shows_the_newest_of_all_workers(server: ServerProcess) -> None:
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("tailed", key, key=key))
    code, shown = cli("topic", "tail", "tailed", "--last", "4", "--url", server.url)
    assert code == 0
    assert [line.rpartition("\t")[2].strip('"') for line in shown["text"].splitlines()] == KEYS[-4:]
    places = [line.partition("\t")[0] for line in shown["text"].splitlines()]
    owners = {key: name for name in NAMES for key in keys_of(name)}
    assert [place.split()[1] for place in places] == [owners[key] for key in KEYS[-4:]], "an offset is one worker's"


def test_metrics_say_which_worker(server: ServerProcess) -> None:
    for accept in ("*/*", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"):
        status, text = ask(server.url, "GET", "/metrics", headers={"accept": accept})
        assert status == 200
        for name in NAMES:
            assert f'notify_topics{{worker="{name}"}}' in text
        assert text.count("# TYPE notify_topics ") == 1 and "# EOF" not in text


def test_a_reader_reads_one_worker_after_the_other(server: ServerProcess) -> None:
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("read", b"", key=key))
    with Reader(server.url) as reader:
        assert sorted(m.key or "" for m in reader.read("read")) == sorted(KEYS)
        assert sorted(m.key or "" for m in reader.read("read", shard="worker-2", offset=1)) == keys_of("worker-2")[1:]


@pytest.mark.long
def test_backups_of_all_workers_are_restored_to_a_divided_directory(
    server: ServerProcess, tmp_path: Path, other_disk: Path
) -> None:
    """With the settings and credentials of all, and with no other number of workers. The first worker has a disk of
    its own, to which and from which no file can be renamed."""
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("kept", b"", key=key))
    fields = {"name": "kept", "rights": ["publish:kept"], "reason": "a test"}
    call(server.url, "POST", "/v1/admin/credentials", fields)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / NAMES[0]).symlink_to(other_disk)
    for name in NAMES:
        copy, to = str(tmp_path / f"copy-{name}"), str(tmp_path / "new" / name)
        code, said = cli("backup", copy, "--url", f"{server.url}/{name}", "--reason", "r")
        assert code == 0, said
        if name == NAMES[-1]:
            with pytest.raises(InvalidRequest, match="has the logs of worker-1 alone"):
                check_count(tmp_path / "new", 2)
        other = str(tmp_path / "new" / ("worker-2" if name == "worker-1" else "worker-1"))
        code, said = cli("restore", copy, "--data-dir", other)
        assert code == 2 and f"the backup is from {name}" in said["text"], said
        code, said = cli("restore", copy, "--data-dir", to)
        assert code == 0, said
    restored = ServerProcess(tmp_path / "new", flags=["--workers", "2"]).start()
    try:
        assert [len(messages) for messages in stored(restored.url, "kept").values()] == [3, 3]
        names = [row["name"] for row in admin(restored.url, "GET", "credentials")["credentials"]]
        assert "kept" in names
    finally:
        stop_if_running(restored)


def test_console_pages_show_all_workers(server: ServerProcess) -> None:
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("paged", b"", key=key))
    subscribe(server.url, "pages", "paged")
    pages = {"/": "", "/topics/paged": "worker-2/0", "/groups/pages": "worker-2: paged/0", "/nodes": "worker-2"}
    for path, text in (pages | {"/messages?topic=paged": "worker-2: paged/0", "/dead-letters": ""}).items():
        status, page = ask(server.url, "GET", path, headers={"accept": "text/html"})
        assert status == 200, (path, page)
        assert text in page, path


@pytest.mark.crash
@pytest.mark.parametrize("kills", [2, pytest.param(16, marks=pytest.mark.long)])
def test_a_worker_that_is_killed_comes_back_and_nothing_is_lost_or_out_of_order(
    server: ServerProcess, kills: int
) -> None:
    topic, count = f"killed-{kills}", 30 * kills
    received = Received(server.url, topic, topic)
    sending = Sending(server.url, topic, KEYS, count)
    with running(received.consumer), sending:
        for n in range(kills):
            before = dict(sending.sent)
            old = server.workers()
            # By turns: a worker that is killed ten times within a minute is not started again.
            os.kill(process_of(server, NAMES[n % 2]), signal.SIGKILL)
            eventually(lambda old=old: len(set(server.workers()) - set(old)) == 1, "another worker")  # type: ignore[misc]
            eventually(
                lambda before=before: all(n > before[k] or n == count for k, n in sending.sent.items()),  # type: ignore[misc]
                "every key to continue",
            )
        eventually(lambda: all(set(received.numbers[key]) == set(range(count)) for key in KEYS), "every message")
    for messages in stored(server.url, topic).values():
        by_key = defaultdict(list)
        for m in messages:
            by_key[m["key"]].append(json.loads(m["body"])["n"])
        for key, numbers in by_key.items():
            assert list(dict.fromkeys(numbers)) == list(range(count)), key


@pytest.mark.long
@pytest.mark.crash
def test_workers_stop_when_their_parent_is_killed_and_the_next_one_serves_their_logs(server: ServerProcess) -> None:
    with TransactionProducer(server.url, group="orders") as producer:
        for key in KEYS:
            producer.publish(Message("orphans", b"", key=key))
    orphans = server.workers()
    server.kill()
    server.start()  # waits for the orphans, which hold the directory's lock
    assert not any(Path(f"/proc/{pid}/cmdline").exists() and pid in server.workers() for pid in orphans)
    assert [len(messages) for messages in stored(server.url, "orphans").values()] == [3, 3]


def test_with_tls_each_worker_has_a_port_and_a_token_holds_at_all(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    secrets = {"NOTIFY_ACCESS": "1", "NOTIFY_TLS_CERTIFICATE": str(authority.issue("server"))}
    trust = ssl.create_default_context(cafile=str(authority.file))
    # On port 0 no other test's server can have the second port already; the parent prints the first.
    server = ServerProcess(
        tmp_path / "data", environment=secrets, flags=["--workers", "2", "--port", "0"], ca=authority.file
    )
    server.start()
    try:
        admin_token = (tmp_path / "data" / "admin.token").read_text().strip()
        status, overview = ask(server.url, "GET", "/v1/admin/overview", token=admin_token, tls=trust)
        assert (status, overview["shards"]) == (200, list(NAMES))
        fields = {"name": "p", "rights": ["publish:t", "check:g"], "reason": "a test"}
        status, made = ask(server.url, "POST", "/v1/admin/credentials", fields, admin_token, tls=trust)
        assert status == 200, made
        with TransactionProducer(server.url, group="g", token=made["token"], tls=trust) as producer:
            for key in KEYS:
                producer.publish(Message("t", b"", key=key))
        _, topic = ask(server.url, "GET", "/v1/admin/topics/t", token=admin_token, tls=trust)
        assert [queue["end"] for queue in topic["queues"]] == [3, 3]
    finally:
        stop_if_running(server)
