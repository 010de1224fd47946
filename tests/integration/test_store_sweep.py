"""`notify store sweep` deletes the bodies that no message names, and none that one still needs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.cli.store import Sweep, named_in_database
from notify.client import Consumer, Message, TransactionProducer
from notify.errors import NotifyError
from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER, mentioned
from notify.testing import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import running, subscribe
from tests.support.http import admin, call
from tests.support.servers import make_storage, stop_if_running, until_known
from tests.support.stored_bodies import LARGE, BodyStore
from tests.support.tenants import Tenants, on_postgresql

__all__ = ["on_postgresql"]

URL = "http://127.0.0.1:9"


@pytest.fixture
def stored(tmp_path: Path) -> BodyStore:
    """A store with a body that no message names, as a transaction leaves it that failed at its COMMIT."""
    store = BodyStore(tmp_path / "store")
    orphan(store, "left")
    return store


def orphan(store: BodyStore, group: str, mode: str = "half", number: int = 1) -> str:
    name = f"{FOLDER}/{group}/{mode}/01900000-0000-7000-8000-{number:012d}"
    Store(store.url).replace(name, b"orphan")
    return name


def swept(store: BodyStore, url: str, *words: str) -> dict[str, Any]:
    status, answer = cli("store", "sweep", store.url, "--url", url, "--min-age", "3600", "--gone", "--json", *words)
    assert status == 0, answer
    return answer


def test_bodies_named_by_a_message_are_kept(
    server: ServerProcess, engine: sa.Engine, stored: BodyStore, unique: str
) -> None:
    """Undecided, delayed, waiting, held by a retry, dead, and in a row that is not sent."""
    url, body = server.url, bytes(LARGE)
    consumer = Consumer(url, group=unique, store=stored.url)
    states = ("waiting", "delayed", "dead", "retried", "half", "row", "rolled")
    topics = {state: f"{unique}-{state}" for state in states}

    @consumer.subscribe(topics["dead"], start="earliest", max_attempts=1)
    @consumer.subscribe(topics["retried"], start="earliest", retry_min=3600, retry_max=3600)
    def on_message(message: object) -> None:
        raise ValueError("not this one")

    subscribe(url, "others", topics["waiting"])
    with TransactionProducer(url, group=unique, store=stored.url, check_after=86_400) as producer:
        for state in ("waiting", "dead", "retried"):
            producer.publish(Message(topics[state], body))
        producer.publish(Message(topics["delayed"], body, delay=86_400))
        producer.prepare([Message(topics["half"], body)])
        producer.prepare([Message(topics["rolled"], body)]).rollback()
    with TransactionProducer(URL, group=unique, engine=engine, mode="outbox", store=stored.url) as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(topics["row"], body))
    with running(consumer):
        eventually(lambda: consumer.failed == 2, "both to fail")
        eventually(lambda: admin(url, "GET", f"groups/{unique}/dead-letters")["messages"], "the dead letter")
    needed = stored.names() - {orphan(stored, "left")}
    assert len(needed) == 7
    stored.age()
    dsn = engine.url.render_as_string(hide_password=False)
    preview = swept(stored, url, "--dsn", dsn, "--dry-run")
    assert (preview["objects"], preview["swept"], preview["names"]) == (8, 1, [orphan(stored, "left")])
    assert stored.names() - needed, "a preview deletes nothing"
    stored.age()
    done = swept(stored, url, "--dsn", dsn, "--group", unique, "--group", "left")
    # The message that was rolled back is in the log, too, until retention drops it.
    assert (done["swept"], done["named"], done["bytes"]) == (1, 7, len(b"orphan"))
    assert stored.names() == needed
    assert Store(stored.url).names(FOLDER) == sorted(needed), "no object of the sweep's own is left"


def test_the_rest_of_what_was_killed_is_deleted(server: ServerProcess, stored: BodyStore) -> None:
    """An upload that was cut before its rename, and the object by which a sweep asked for the store's time."""
    (name,) = stored.names()
    rest = (f"{name}.next", f"{FOLDER}/.sweep-x")
    for each in rest:
        Store(stored.url).replace(each, b"x")
        os.utime(stored.path(each), (0, time.time() - 7_200))
    swept(stored, server.url, "--group", "left")
    assert Store(stored.url).names(FOLDER) == [name], "the body itself is young"


def test_each_worker_is_asked(tmp_path: Path, stored: BodyStore) -> None:
    """Each has a log of its own."""
    server = ServerProcess(tmp_path / "data", flags=["--workers", "2"]).start()
    try:
        with TransactionProducer(server.url, group="shop", store=stored.url, store_above=0) as producer:
            for n in range(20):
                producer.publish(Message("t", "x", key=str(n)))
        stored.age()
        assert swept(stored, server.url, "--group", "shop")["named"] == 20
    finally:
        server.stop()
    assert len(stored.names()) == 21


def test_halves_in_a_database_are_asked_for(tmp_path: Path, stored: BodyStore) -> None:
    """Through their server, and in the database itself."""
    storage = f"sqlite:///{tmp_path / 'server.db'}"
    server = ServerProcess(tmp_path / "data", flags=["--storage", storage]).start()
    try:
        with TransactionProducer(server.url, group="shop", store=stored.url, store_above=0) as producer:
            for n in range(3):
                producer.prepare([Message("t", str(n))])
        stored.age()
        assert swept(stored, server.url, "--group", "shop", "--logs", "0")["named"] == 3
        found = set[str]().union(*named_in_database(storage, None, None))
        assert len(found) == 3 and found < stored.names()
    finally:
        server.stop()


def test_young_bodies_are_kept(server: ServerProcess, stored: BodyStore) -> None:
    assert swept(stored, server.url, "--group", "left")["young"] == 1
    assert len(stored.names()) == 1
    stored.age(3601)
    assert swept(stored, server.url, "--group", "left")["swept"] == 1
    assert stored.names() == set()


def test_only_the_named_groups(server: ServerProcess, stored: BodyStore) -> None:
    kept = orphan(stored, "other")
    stored.age()
    assert swept(stored, server.url, "--group", "left")["swept"] == 1
    assert stored.names() == {kept}


def test_nothing_else_of_the_store_is_touched(server: ServerProcess, stored: BodyStore) -> None:
    others = ("segments/1.log", f"{FOLDER}/README", f"{FOLDER}/left/half/no-uuid", "left/half/x")
    for name in others:
        Store(stored.url).replace(name, b"x")
    stored.age()
    swept(stored, server.url, "--group", "left")
    assert all(stored.path(name).read_bytes() == b"x" for name in others) and stored.names() == set()


@pytest.fixture
def refused(stored: BodyStore) -> Iterator[BodyStore]:
    """The store, of which nothing may be deleted."""
    orphan(stored, "rows", "outbox")
    stored.age(200_000)
    before = stored.names()
    yield stored
    assert stored.names() == before


def test_without_groups_it_deletes_nothing(server: ServerProcess, refused: BodyStore) -> None:
    status, answer = cli("store", "sweep", refused.url, "--url", server.url)
    assert status == 2 and "--group" in answer["text"]


def test_without_the_rows_it_deletes_nothing(server: ServerProcess, refused: BodyStore) -> None:
    status, answer = cli("store", "sweep", refused.url, "--url", server.url, "--group", "rows")
    assert status == 2 and "name all of these with --dsn" in answer["text"]


def test_at_the_wrong_server_it_deletes_nothing(server: ServerProcess, refused: BodyStore) -> None:
    """One of another environment, say, names none of the bodies."""
    status, answer = cli("store", "sweep", refused.url, "--url", server.url, "--group", "left")
    assert status == 2 and "are these the servers" in answer["text"] and "--gone" in answer["text"]


def test_if_a_server_is_away_it_deletes_nothing(server: ServerProcess, refused: BodyStore) -> None:
    with pytest.raises(NotifyError, match=r"127\.0\.0\.1:9"):
        Sweep(Store(refused.url), ["left"], 3600).run([server.url, URL])


@pytest.mark.long
def test_if_a_server_of_the_registry_is_stopped_it_deletes_nothing(tmp_path: Path, stored: BodyStore) -> None:
    """Each has a log of its own, and the registry lists a server only while it runs."""
    registry = f"sqlite:///{tmp_path / 'registry.db'}"
    make_storage(registry)
    servers = [ServerProcess(tmp_path / f"s{n}", flags=["--registry", registry, "--shard", f"s{n}"]) for n in range(2)]
    needed = set[str]()
    try:
        for server in servers:
            server.start()
        until_known(servers)
        for server in servers:
            with TransactionProducer(server.url, group="shop", store=stored.url, store_above=0) as producer:
                producer.prepare([Message("t", "x")])
        needed = stored.names() - {orphan(stored, "left")}
        stored.age()
        url, groups = servers[0].url, ("--group", "shop", "--group", "left")
        status, answer = cli("store", "sweep", stored.url, "--url", url, *groups)
        assert status == 2 and "--logs" in answer["text"]
        servers[1].stop()
        eventually(lambda: len(call(url, "GET", "/v1/members")["members"]) == 1, "the other one to be gone")
        status, answer = cli("store", "sweep", stored.url, "--url", url, *groups, "--logs", "2")
        assert status == 2 and "1 of 2 servers" in answer["text"]
        assert stored.names() > needed
        servers[1].start()
        until_known(servers)
        assert swept(stored, url, *groups, "--logs", "2")["swept"] == 1
    finally:
        for server in servers:
            stop_if_running(server)
    assert stored.names() == needed


def test_if_a_schema_is_hidden_it_deletes_nothing(
    server: ServerProcess, refused: BodyStore, on_postgresql: Tenants, unique: str
) -> None:
    """A role without USAGE does not even see that a tenant has the table among its own."""
    one, two = on_postgresql.make("t1"), on_postgresql.make("t2")
    on_postgresql.run(
        f"CREATE ROLE {unique} LOGIN", f"GRANT USAGE ON SCHEMA {one} TO {unique}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {one} TO {unique}",
    )  # fmt: skip
    dsn = sa.make_url(on_postgresql.url).set(username=unique).render_as_string(hide_password=False)
    words = ("store", "sweep", refused.url, "--url", server.url, "--dsn", dsn, "--group", "left", "--gone")
    status, answer = cli(*words)
    assert status == 2 and two in answer["text"] and "USAGE" in answer["text"]
    assert set().union(*named_in_database(dsn, None, one)) == set()
    on_postgresql.run(f"GRANT USAGE ON SCHEMA {two} TO {unique}")
    status, answer = cli(*words)
    assert status == 2 and "half_message" in answer["text"], "SELECT is still missing"


def test_a_name_is_found_however_its_sender_encodes_json() -> None:
    """PHP's encoder writes each slash as \\/: a sweep deleted the bodies of such messages."""
    name = f"{FOLDER}/shop/half/01900000-0000-7000-8000-000000000001"
    for text in (json.dumps({"name": name}), json.dumps({"name": name}).replace("/", "\\/")):
        assert mentioned(b"x" + text.encode() + b"y") == {name} == {json.loads(text)["name"]}


def test_a_body_that_is_needed_is_named_however_long_the_log_is(
    server: ServerProcess, stored: BodyStore, unique: str
) -> None:
    """The list comes in parts."""
    with TransactionProducer(server.url, group=unique, store=stored.url, store_above=0) as producer:
        for n in range(50):
            producer.publish(Message(unique, str(n)))
    stored.age()
    assert swept(stored, server.url, "--group", unique)["named"] == 50
    assert len(stored.names()) == 51
