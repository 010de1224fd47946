"""Versions: logs and tables of an earlier version open, and its server and SDK work with today's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check.question import ask as ask_database
from notify.client import Inbox, Reader, ReceivedMessage, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message
from notify.errors import Unavailable
from notify.movers.relay.relay import Relay
from notify.runtime.databases import database_now
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.fixtures import life
from tests.support.background import in_background
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import Caller, subscribe
from tests.support.http import admin, ask, post
from tests.support.servers import make_storage, stop_if_running
from tests.support.shop import make_engine
from tests.support.versions import (
    EARLIER,
    FIXTURES,
    FOR_EVER,
    ROOT,
    earlier_version,
    run_sdk,
    run_statements,
    server_of,
    service_tables,
    unpack,
)

__all__ = ["earlier_version"]

FILES = FIXTURES / EARLIER
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text())


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of this version on a data directory of an earlier version, which was `stopped` or `killed`."""
    data = unpack((FILES / f"{request.param}.txt").read_text(), tmp_path / "data")
    server = ServerProcess(data, environment=FOR_EVER | {"NOTIFY_SEGMENT_BYTES": str(life.SEGMENT_BYTES)})
    server.start()
    yield server
    stop_if_running(server)


def decide(url: str, names: list[str], outcome: str) -> None:
    body = {"producer_group": life.PRODUCERS, "outcomes": [{"id": name, "outcome": outcome} for name in names]}
    assert [item["status"] for item in post(url, "/v1/transactions/outcomes", body)["items"]] == [200] * len(names)


def at_this_time(queues: dict[str, Any]) -> dict[str, Any]:
    """The queues' expected content now: a delayed message may have come due since."""
    made = datetime.fromisoformat(queues["topics"]["plain"]["queues"][0][0]["committed_at"])
    if datetime.now(UTC) > made + timedelta(days=life.DELAYED_DAYS):
        queues = json.loads(json.dumps(queues))
        queues["topics"].pop("later")
        queues["delayed"] = 0.0
    return queues


@pytest.mark.parametrize("served", ["stopped", "killed"], indirect=True)
def test_a_log_of_an_earlier_version_is_as_it_was(served: ServerProcess) -> None:
    """Every message, state, policy, subscription, progress and retry is there, and all clients continue."""
    url, expected = served.url, EXPECTED["log"]
    lived, wanted = expected["lived"], at_this_time(expected["queues"])
    assert life.seen_transactions(url, lived) == life.without_places(expected["transactions"])
    queues = life.seen_queues(url)
    queues["topics"] = {name: queues["topics"][name] for name in wanted["topics"]}
    assert queues == wanted
    # The opposite of a recorded outcome is refused; an undecided transaction is decided.
    body = {"producer_group": life.PRODUCERS, "outcomes": [{"id": lived["COMMITTED"][0], "outcome": "ROLLBACK"}]}
    assert post(url, "/v1/transactions/outcomes", body)["items"][0]["status"] == 409
    decide(url, lived["PREPARED"][:2], "COMMIT")
    decide(url, lived["PREPARED"][2:], "ROLLBACK")
    # The group continues at its offsets: acknowledged messages do not come again.
    points = Caller(url, "points", "i2")
    came: list[dict[str, Any]] = []

    def drained() -> bool:
        batch = points.receive("plain", max=100)
        points.settle(batch)
        came.extend(batch)
        return len(came) >= 6

    eventually(drained, "the 6 messages that points has not settled")
    plain = [m["body"] for m in wanted["topics"]["plain"]["queues"][0] if "body" in m]
    assert sorted(m.get("body", "") for m in came) == sorted([plain[2], *plain[6:], ""])
    assert [m["attempt"] for m in came if m.get("body") == plain[2]] == [2]
    orders = points.receive("orders", max=100)
    settled = sum(q["position"] for q in wanted["groups"]["points"]["queues"] if q["topic"] == "orders")
    assert len(orders) == 13 + 2 - settled and points.settle(orders) == [200] * len(orders)
    # After a restart this version reads its own records beside the old ones.
    served.stop()
    served.start()
    states = {name: admin(url, "GET", f"transactions/{name}")["state"] for name in lived["PREPARED"]}
    assert list(states.values()) == ["COMMITTED", "COMMITTED", "ROLLED_BACK"]
    assert points.receive("plain", "orders", max=100) == []


@pytest.mark.parametrize("served", ["killed"], indirect=True)
def test_halves_of_an_earlier_sdk_are_resolved_by_this_one(served: ServerProcess, tmp_path: Path) -> None:
    """Transactions that an older SDK left in doubt are answered from the service's database."""
    engine = make_engine(f"sqlite:///{tmp_path}/shop.db")
    run_statements(engine, (FILES / "service.sqlite.sql").read_text())
    assert create_tables(engine) == EXPECTED["service"]["source"]
    rows = EXPECTED["service"]["rows"]["half_message"]
    names = [row["transaction_id"] for row in rows if row["mode"] == "half" and row["state"] == "COMMITTED"]
    with TransactionProducer(served.url, group="shop-db", engine=engine):
        for name in names:
            # Before somebody asks for a check, its own may have come.
            status, _ = ask(served.url, "POST", f"/v1/admin/transactions/{name}/check", {"reason": "a test"})
            assert status in (200, 409)
        for name in names:
            eventually(
                lambda n=name: admin(served.url, "GET", f"transactions/{n}")["state"] == "COMMITTED",  # type: ignore[misc]
                "the transaction to be committed",
            )
    engine.dispose()


def test_a_storage_of_an_earlier_version_is_as_it_was(tmp_path: Path) -> None:
    """After `storage upgrade` SQL storage has every transaction in its state, and undecided ones are decided."""
    url = f"sqlite:///{tmp_path}/storage.db"
    engine = sa.create_engine(url)
    run_statements(engine, (FILES / "storage.sqlite.sql").read_text())
    engine.dispose()
    make_storage(url)
    server = ServerProcess(tmp_path / "data", environment=FOR_EVER, flags=["--storage", url]).start()
    try:
        lived = EXPECTED["sql"]["lived"]
        wanted = life.without_places(EXPECTED["sql"]["transactions"], has_queues=False)
        assert life.seen_transactions(server.url, lived) == wanted
        decide(server.url, lived["PREPARED"], "COMMIT")
        assert {admin(server.url, "GET", f"transactions/{n}")["state"] for n in lived["PREPARED"]} == {"COMMITTED"}
    finally:
        server.stop()


@pytest.mark.long
def test_a_services_database_of_an_earlier_version_is_as_it_was(
    engine_url: str, database: str, notify_server: InMemoryServer
) -> None:
    """`create_tables` keeps every row; claims and tombstones hold; waiting rows of the outbox are relayed."""
    engine = make_engine(engine_url)
    run_statements(engine, service_tables(database))
    wanted = EXPECTED["service"]
    for _ in range(2):  # the second run changes nothing
        assert create_tables(engine) == wanted["source"]
    with engine.connect() as connection:
        for table, rows in wanted["rows"].items():
            kept = [dict(row) for row in connection.exec_driver_sql(f"SELECT * FROM {table}").mappings()]
            assert sorted(map(comparable, keep(kept, rows[0]))) == sorted(map(comparable, rows))
        connection.rollback()
        assert ask_database(connection, wanted["tombstone"], "shop-db").state == "ROLLED_BACK"

    def effect(message: ReceivedMessage, session: Session) -> None:
        raise AssertionError("this effect has happened before")

    for name in wanted["inbox"]:
        message = ReceivedMessage(name, "t", 0, 0, b"x", None, None, {}, 2, "")
        assert not Inbox(engine).run("points", message, effect)
        assert Inbox(engine).run("others", message, lambda message, session: None)

    with engine.begin() as connection:  # rows older than a server's memory of ids are put on a list instead
        connection.execute(half_message.update().values(created_at=database_now()))

    with in_background(Relay(engine, notify_server.url).run()):
        notify_server.wait_for("outbox", 3, PATIENCE_SECONDS)
    assert [m.text for m in notify_server.messages("outbox")] == [f"Grüße {n}" for n in range(3)]
    engine.dispose()


def keep(rows: list[dict[str, Any]], columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, without columns that are newer than the fixture."""
    return [{name: row[name] for name in columns} for row in rows]


def comparable(row: dict[str, Any]) -> str:
    """A row as text in which a database's way of showing bytes, instants and numbers makes no difference."""
    return json.dumps({name: _plain(name, value) for name, value in row.items()}, sort_keys=True)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, datetime):
        value = value.isoformat(" ")
    if name.endswith("_at") and value is not None:
        return str(value).rstrip("0").rstrip(".")
    return value.hex() if isinstance(value, bytes) else value


# --- side by side -------------------------------------------------------------------------------------------------

EFFECTS = {
    "came": True,
    "effects": ["asked back", "fails once", "published", "told"],
    "runs": [["asked back", 1], ["fails once", 1], ["fails once", 2], ["published", 1], ["told", 1]],
}


@pytest.mark.long
def test_an_earlier_sdk_gets_on_with_this_server(
    earlier_version: Path, server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    """An earlier SDK's half, commit, check, retry, delay and inbox work, on tables that this version made."""
    engine = make_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    engine.dispose()
    # Deliveries carry a field that an earlier SDK does not know.
    subscribe(server.url, unique, unique)
    admin(server.url, "POST", f"groups/{unique}/reset", {"topic": unique, "to": "earliest", "replay_effects": True})
    lived = json.loads(run_sdk(earlier_version, FIXTURES / "sdk_life.py", server.url, f"{tmp_path}/shop.db", unique))
    assert lived == EFFECTS | {"code": str(earlier_version / "notify" / "__init__.py")}


@pytest.mark.long
def test_this_sdk_gets_on_with_an_earlier_server(earlier_version: Path, unique: str, tmp_path: Path) -> None:
    old = server_of(earlier_version, tmp_path / "data").start()
    try:
        lived = json.loads(run_sdk(ROOT, FIXTURES / "sdk_life.py", old.url, f"{tmp_path}/shop.db", unique))
        assert lived == EFFECTS | {"code": str(ROOT / "notify" / "__init__.py")}
        with Reader(old.url) as reader:
            assert len(list(reader.read(unique))) == len(list(reader.read(unique))) == len(EFFECTS["effects"]) > 0
    finally:
        old.stop()


@pytest.mark.long
def test_going_back_works_or_is_refused_in_one_sentence(earlier_version: Path, tmp_path: Path) -> None:
    """A server of an earlier version starts on this version's data directory, or refuses it in one sentence."""
    data = tmp_path / "data"
    server = ServerProcess(data, environment=FOR_EVER | {"NOTIFY_CHECK_BACKOFF_SECONDS": "0.2"}).start()
    life.live_queues(server.url)
    lived = life.live_transactions(server.url)
    life.live_groups(server.url)
    transactions, queues = life.seen_transactions(server.url, lived), life.seen_queues(server.url)
    server.stop()
    old = server_of(earlier_version, data, **FOR_EVER)
    try:
        old.start()
    except Unavailable:
        said = [line for line in "".join(old.output).splitlines() if line.startswith("notify: ")]
        assert len(said) == 1 and "Traceback" not in "".join(old.output), old.output
        return
    try:
        assert life.seen_transactions(old.url, lived) == transactions
        assert life.seen_queues(old.url) == queues
    finally:
        old.stop()
