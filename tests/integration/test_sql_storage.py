"""SQL storage: cut connections, refused values, competing servers, purges."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog

from notify.client.producer.transactions import HALF_SECONDS
from notify.errors import Conflict, DiskFull, InvalidRequest, Unavailable
from notify.protocol import ids
from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.runtime import faults
from notify.runtime.clock import wall_clock as now
from notify.runtime.databases import DROPPED, REFUSED, RELAYED, at_level
from notify.storage.checks import CheckAnswer
from notify.storage.members import Member
from notify.storage.records import NewMessage, NewTransaction, PartlyStored, Put, State
from notify.storage.sql import checks, engines, movers, registry, writer
from notify.storage.sql.database import Database
from notify.storage.sql.dialect import Gone
from notify.storage.sql.engines import opened
from notify.storage.sql.rows import moment_of, rows_of
from notify.storage.sql.store import SqlStore
from notify.storage.sql.tables import server_half_message, server_member
from tests.support.commands import cli
from tests.support.databases import MOST, empty_database
from tests.support.http import ask, call
from tests.support.proxy import Proxy, unencrypted
from tests.support.servers import Started, make_storage
from tests.support.sql_storage import use
from tests.support.transactions import half_request, sent

SECOND = 1_000_000
pytestmark = pytest.mark.usefixtures("patient_writers")


@pytest.fixture(scope="module", params=MOST)
def shared_storage(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with empty_database(request.param, database_urls, tmp_path_factory.mktemp("shared")) as url:
        make_storage(url)
        yield url


@pytest.fixture
def storage(shared_storage: str) -> str:
    """The URL of a database with the server's tables, emptied."""
    with opened(shared_storage) as engine, engine.begin() as connection:
        connection.execute(sa.delete(server_half_message))
        connection.execute(sa.delete(server_member))
    return shared_storage


def is_mariadb(url: str) -> bool:
    with opened(url) as engine, engine.connect() as connection:
        return bool(getattr(connection.dialect, "is_mariadb", False))


@pytest.fixture
def proxied(storage: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of the database, and the database's URL through it."""
    if storage.startswith("sqlite"):
        pytest.skip("SQLite is a file: its COMMIT has no connection that could be cut")
    url = sa.make_url(storage)
    with Proxy(url.host or "", url.port or 0) as proxy:
        through = unencrypted(url).set(host="127.0.0.1", port=proxy.port)
        yield proxy, through.render_as_string(hide_password=False)


@pytest.mark.parametrize("executed", [False, True], ids=["before it arrives", "before its answer arrives"])
def test_a_commit_that_is_cut_neither_loses_nor_doubles(
    proxied: tuple[Proxy, str], storage: str, executed: bool
) -> None:
    proxy, url = proxied

    async def scenario(store: SqlStore) -> None:
        first = sent()
        await store.put([first], now())
        t, at_once = sent(), sent(committed=True)
        proxy.cut_at(rb"COMMIT(\0|$)", answer=executed)
        results = await store.put([t, at_once], now())
        assert proxy.cuts == 1
        assert {r.put for r in results} == {Put.ALREADY if executed else Put.STORED}
        proxy.cut_at(rb"COMMIT(\0|$)", answer=executed)
        (decided,) = await store.decide([(t.id, "g", State.COMMITTED)], now())
        assert proxy.cuts == 2
        assert (decided.found, decided.state, decided.changed) == (True, State.COMMITTED, not executed)
        assert await store.states([t.id, at_once.id]) == [State.COMMITTED, State.COMMITTED]

    use(url, scenario, writers=1)
    engine = sa.create_engine(storage)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(server_half_message)) == 3
    engine.dispose()


def test_a_session_that_broke_is_an_error_of_sqlalchemy(proxied: tuple[Proxy, str]) -> None:
    """Also in the first moment of its next use, and where an isolation level is set: all that looks for databases that
    are unreachable looks for these errors."""
    proxy, url = proxied
    with opened(url) as engine:
        with engine.connect() as held:
            with engine.connect() as pooled:
                assert pooled.exec_driver_sql("SELECT 1").scalar() == 1
            assert held.exec_driver_sql("SELECT 1").scalar() == 1
            held.rollback()
            proxy.close()
            with pytest.raises(faults.DATABASE_AWAY):
                at_level(held, "AUTOCOMMIT").exec_driver_sql("SELECT 1")
        with pytest.raises(faults.DATABASE_AWAY), engine.begin() as connection:
            connection.exec_driver_sql("SELECT 1")
        proxy.reopen()
        with engine.connect() as connection:
            assert at_level(connection, "AUTOCOMMIT").exec_driver_sql("SELECT 1").scalar() == 1


def test_a_session_reads_what_is_committed(storage: str) -> None:
    """Whatever the database's default is, and also in a session that was used with another level."""
    level = {"sqlite": "SERIALIZABLE"}.get(sa.make_url(storage).get_backend_name(), "READ COMMITTED")
    with opened(storage) as engine:
        with engine.connect() as connection:
            assert connection.get_isolation_level() == level
        with engine.connect() as connection:
            at_level(connection, "SERIALIZABLE")
        with engine.connect() as connection:
            assert connection.get_isolation_level() == level


def test_a_writer_gives_up_before_its_callers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert writer.GIVE_UP_SECONDS < HALF_SECONDS


@pytest.mark.usefixtures("impatient_writers")
def test_a_database_that_is_away_is_waited_for_and_then_said(proxied: tuple[Proxy, str]) -> None:
    """The error says that nobody knows whether the transaction was stored."""
    proxy, url = proxied

    async def scenario(store: SqlStore) -> None:
        await store.put([sent()], now())
        proxy.close()
        with pytest.raises(Unavailable, match="not known"):
            await store.put([sent()], now())
        assert store.writer.failing_since

    use(url, scenario, writers=1)


def test_a_server_frozen_in_its_transaction_holds_nobody_up_for_long(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen server's locks end soon. They lasted as long as its connection, which TCP gives up after hours."""
    if storage.startswith("sqlite"):
        pytest.skip("SQLite is a file: one that is frozen holds its lock")
    monkeypatch.setattr(engines, "IDLE_IN_TRANSACTION_SECONDS", 2)
    monkeypatch.setattr(engines, "IDLE_SECONDS", 2)  # the bound of MySQL, a minute for the whole session

    async def scenario(store: SqlStore) -> None:
        t = sent()
        frozen = SqlStore(storage)
        connection = frozen.dialect.connect()
        frozen.dialect.insert(connection, rows_of(t, now()))
        result = (await store.put([t], now()))[0]
        assert result.put is Put.STORED, "what the frozen one did not commit is gone"
        assert (await store.decide([(t.id, "g", State.COMMITTED)], now()))[0].changed
        with pytest.raises(Exception, match=r"(?i)timeout|lost|gone|terminat|closed") as raised:
            frozen.dialect.commit(connection)
        # Whoever waited for it is told to try again: PostgreSQL's 25P03 was a StorageFailed.
        assert isinstance(frozen.dialect.error(raised.value), Gone)
        connection.close()
        frozen.engine.dispose()

    use(storage, scenario, writers=1)


@pytest.mark.usefixtures("impatient_writers")
def test_a_primary_that_becomes_a_standby_is_left_out_until_it_takes_writes(storage: str) -> None:
    """Each write was a StorageFailed, the shard counted as healthy, and the pool kept its sessions until a restart."""
    if not storage.startswith("postgresql"):
        pytest.skip("the standbys of MariaDB and MySQL refuse writes for the whole server, which other tests use, too")
    name = sa.make_url(storage).database
    admin = sa.create_engine(
        storage,
        isolation_level="AUTOCOMMIT",
        connect_args={"options": "-c default_transaction_read_only=off"},
    )

    def switch(*, is_standby: bool, ends_sessions: bool) -> None:
        with admin.connect() as connection:
            value = "on" if is_standby else "off"
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
            if ends_sessions:
                others = "datname = current_database() AND pid <> pg_backend_pid()"
                connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")

    async def scenario(store: SqlStore) -> None:
        t = sent()
        await store.put([t], now())
        member = Member("server-x", "server")

        def beat() -> None:
            with store.engine.begin() as connection:
                registry.heartbeat(connection, member)

        switch(is_standby=True, ends_sessions=True)
        with pytest.raises(Unavailable, match="not known"):
            await store.put([sent()], now())
        assert store.writer.failing_since
        with pytest.raises(Unavailable, match="read-only"):
            await store.probe()  # one that only read said each second that the shard is back
        assert store.writer.failing_since
        with pytest.raises(Unavailable, match="read-only"):
            await store.resume_checks(t.id, now(), reset=True)
        for _ in range(2):
            with pytest.raises(faults.DATABASE_AWAY, match="read-only"):
                beat()
        # The new primary answers at the same address: the sessions of the old one are not used again.
        switch(is_standby=False, ends_sessions=False)
        beat()
        await store.probe()
        assert not store.writer.failing_since
        assert await store.resume_checks(t.id, now(), reset=True)
        assert (await store.put([sent()], now()))[0].put is Put.STORED
        with store.engine.connect() as connection:
            assert list(connection.scalars(sa.select(server_member.c.name))) == ["server-x"], "no probe leaves a row"

    try:
        use(storage, scenario, writers=1)
    finally:
        switch(is_standby=False, ends_sessions=True)
        admin.dispose()


def test_sessions_have_bounds(storage: str) -> None:
    """Sessions of a pool and of a writer have bounds, also after a rollback."""
    if storage.startswith("sqlite"):
        pytest.skip("SQLite has no sessions")
    names = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "tcp_keepalives_idle"]
    ask, wanted = "SELECT " + ", ".join(f"current_setting('{n}')" for n in names), ("10s", "2s", "15s", "10")
    if not storage.startswith("postgresql"):
        # MySQL has no bound for a silent transaction, only one for a silent session.
        idle, seconds = ("idle_transaction_timeout", 15) if is_mariadb(storage) else ("wait_timeout", 60)
        ask, wanted = f"SELECT CONCAT(@@{idle}, ' ', @@innodb_lock_wait_timeout)", (f"{seconds} 2",)
    with opened(storage) as engine:
        with engine.connect() as pooled:
            for _ in range(2):
                assert tuple(pooled.exec_driver_sql(ask).one()) == wanted
                pooled.rollback()
        connection = engines.detached(engine)
        with connection.cursor() as cursor:
            cursor.execute(ask)
            assert tuple(cursor.fetchone()) == wanted
        connection.close()


def test_two_servers_never_ask_the_same_check(storage: str) -> None:
    async def scenario(store: SqlStore) -> None:
        two = SqlStore(storage)
        await two.open(now())
        halves = [sent(check_after_us=0) for _ in range(200)]
        await store.put(halves, now())
        later = now() + SECOND
        claims = []
        for step in range(6):
            at = later + step * SECOND  # later than the pause between two looks
            claims += await asyncio.gather(
                *(s.claim_checks("g", at, 40, 600 * SECOND) for s in (store, two, store, two))
            )
        asked = [due for claimed in claims for due in claimed]
        assert len(asked) == len({due.id for due in asked}) == 200
        due = asked[0]
        assert not await two.answer_check(CheckAnswer(due.id, due.token - 1, later, 1, False))
        assert await two.answer_check(CheckAnswer(due.id, due.token, later, 1, False))
        assert not await store.answer_check(CheckAnswer(due.id, due.token, later, 1, False))
        await two.close()

    use(storage, scenario)


def test_undecided_transactions_are_counted_without_reading_others(storage: str) -> None:
    """Each server asks every 5 s. It read up to 2,000 halves whole, bodies and all, and MariaDB every decided row."""
    asked: list[tuple[str, Any]] = []

    async def scenario(store: SqlStore) -> None:
        decided = [sent(group=f"g{n % 3}", committed=True) for n in range(300)]
        await store.put(decided, now())
        first, parked, other = sent(group="g1"), sent(group="g2"), sent(group="h")
        for at_us, t in ((1, first), (2, parked), (3, other)):
            await store.put([t], now() - 60 * SECOND + at_us)
        (due,) = await store.claim_checks("g2", now(), 10, SECOND)
        assert await store.answer_check(CheckAnswer(due.id, due.token, now() + SECOND, 15, True))
        with store.engine.begin() as connection:
            if connection.dialect.name in ("mysql", "mariadb"):
                connection.exec_driver_sql("ANALYZE TABLE server_half_message")
            elif connection.dialect.name == "postgresql":
                connection.exec_driver_sql("ANALYZE server_half_message")
        sa.event.listen(store.engine, "before_cursor_execute", lambda *call: asked.append(call[2:4]))
        doubt = await store.in_doubt()
        assert (doubt.prepared, doubt.parked, doubt.oldest_group) == (2, 1, "g1")
        assert abs(now() - 60 * SECOND - doubt.oldest_us) < 30 * SECOND
        assert asked and not any("body" in statement for statement, _ in asked)
        assert [t.id for t in await store.undecided(None, None, None, 2)] == [first.id, parked.id]
        assert [t.id for t in await store.undecided(State.PREPARED, None, None, 9)] == [first.id, other.id]

    use(storage, scenario)
    if storage.startswith(("mysql", "mariadb")):
        with opened(storage) as engine, engine.connect() as connection:
            counting = [(text, given) for text, given in asked if "DISTINCT" not in text]
            plans = [
                connection.exec_driver_sql(f"EXPLAIN FORMAT=TRADITIONAL {text}", given).mappings().all()
                for text, given in counting
            ]
            assert max(int(row["rows"] or 0) for plan in plans for row in plan if row["table"]) < 100


def test_outcomes_of_several_servers_compare_and_set(storage: str) -> None:
    async def scenario(store: SqlStore) -> None:
        two = SqlStore(storage)
        await two.open(now())
        halves = [sent() for _ in range(100)]
        await store.put(halves, now())
        commits = [(t.id, "g", State.COMMITTED) for t in halves]
        rollbacks = [(t.id, "g", State.ROLLED_BACK) for t in halves]
        first, second = await asyncio.gather(store.decide(commits, now()), two.decide(rollbacks, now()))
        assert all(a.changed != b.changed and a.state == b.state for a, b in zip(first, second, strict=True))
        assert await store.states([t.id for t in halves]) == [a.state for a in first]
        await two.close()

    use(storage, scenario)


@pytest.mark.parametrize("bad", [{"source": "x" * 300}, {"key": "a\0b"}], ids=["too long", "NUL"])
def test_a_transaction_refused_by_the_database_slows_no_other(storage: str, bad: dict[str, str]) -> None:
    """The batch is halved until the refused one is alone. Each of the others was written alone, with its own commit."""
    if storage.startswith("sqlite") or ("key" in bad and not storage.startswith("postgresql")):
        pytest.skip("the database holds this")

    async def scenario(store: SqlStore) -> None:
        calls = [store.put([sent()], now()) for _ in range(300)]
        calls[150:150] = [store.put([sent(**bad), sent()], now())]  # type: ignore[arg-type]
        results = await asyncio.gather(*calls, return_exceptions=True)
        partly = results.pop(150)
        assert isinstance(partly, PartlyStored)
        refused, stored = partly.results
        assert isinstance(refused, InvalidRequest) and refused.code == "invalid_value"
        assert stored.put is Put.STORED and stored.shard == "main"
        assert all(isinstance(result, list) and result[0].put is Put.STORED for result in results)
        assert store.writer.batches < 30

    use(storage, scenario, writers=1)


@pytest.mark.usefixtures("impatient_writers")
def test_a_full_database_says_so_and_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 500 `storage_failed`, which nobody tries again, and each of a batch's transactions was tried alone."""

    async def scenario(store: SqlStore) -> None:
        first = sent()
        await store.put([first], now())
        most_pages = 1  # as many as there are, at least
        connect = store.dialect.connect

        def connected() -> Any:
            connection = connect()
            connection._real.execute(f"PRAGMA max_page_count = {most_pages}")
            return connection

        store.dialect.connect = connected  # type: ignore[method-assign]
        monkeypatch.setattr(writer, "RECYCLE_SECONDS", -1)  # each batch has a connection of its own
        for _ in range(2):
            with pytest.raises(DiskFull, match="no room"):
                await store.put([sent(bytes(100_000)), sent(bytes(100_000))], now())
        assert await store.states([first.id]) == [State.PREPARED]
        most_pages = 1_000_000
        assert (await store.put([sent(bytes(100_000))], now()))[0].put is Put.STORED

    use(f"sqlite:///{tmp_path}/storage.db", scenario)


def test_a_fault_of_the_server_is_not_called_the_databases(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the server fails its own transaction alone, and the log has its traceback."""

    async def scenario(store: SqlStore) -> None:
        good, bad = sent(), sent()

        def rows_of(t: NewTransaction, now_us: int) -> Any:
            if t.id == bad.id:
                raise TypeError("unsupported operand")
            return rows(t, now_us)

        rows = writer.rows_of
        monkeypatch.setattr(writer, "rows_of", rows_of)
        before = faults.count()
        with structlog.testing.capture_logs() as logged:
            stored, refused = await asyncio.gather(
                store.put([good], now()), store.put([bad], now()), return_exceptions=True
            )
        assert isinstance(stored, list) and stored[0].put is Put.STORED
        assert isinstance(refused, PartlyStored)
        assert [str(error) for error in refused.results] == ["the server failed on this; its log says why"]
        assert faults.count() == before + 1
        (line,) = [line for line in logged if line["event"] == "write_failed"]
        assert "unsupported operand" in line["trace"]

    use(storage, scenario, writers=1)


def test_text_of_every_kind_comes_back(storage: str) -> None:
    async def scenario(store: SqlStore) -> None:
        awkward = ["it's", 'a "quote"', "back\\slash\\n", "tab\tnew\nline\r", "%s {0} $1 :x", "ключ 🗝", "\\N", "NULL"]
        halves = []
        for text in awkward:
            payload = encode_msgpack(Payload("t", text.encode() + bytes(range(256)), text, "tag", {text: text}, 5.5))
            new = NewMessage("t", payload, text, "tag", delay_us=1_500_000, ttl_us=5_500_000)
            halves.append(NewTransaction(ids.new_id(), "g", [new], source=text, instance=text, check_after_us=0))
        await store.put(halves, now())
        due = {d.id: d for d in await store.claim_checks("g", now() + SECOND, 100, SECOND)}
        assert [(due[t.id].source, due[t.id].instance) for t in halves] == [(text, text) for text in awkward]
        contents = await store.half_contents([due[t.id] for t in halves])
        assert contents == [[decode_payload(t.messages[0].payload)] for t in halves]
        assert {r.put for r in await store.put(halves, now())} == {Put.ALREADY}

    use(storage, scenario)


def test_a_text_that_postgresql_cannot_hold_is_refused_as_such(storage: str, tmp_path: Path) -> None:
    """A NUL is answered with 422. A key with one gave a 500, and a search for a group with one a 503."""
    if not storage.startswith("postgresql"):
        pytest.skip("the others hold a NUL")
    with ExitStack() as stack:
        server = Started(storage, tmp_path, stack).add()
        halves = [half_request(key=key)["transactions"][0] for key in ("a\nb", "a\0b")]
        request = {"producer_group": "g", "transactions": halves}
        items = call(server.url, "POST", "/v1/transactions", request)["items"]
        assert [item["status"] for item in items] == [201, 422]
        assert "NUL" in items[1]["detail"] and "key" in items[1]["detail"]
        status, answer = ask(server.url, "GET", "/v1/admin/transactions?producer_group=a%00b")
        assert (status, answer["code"]) == (422, "invalid_name")


def test_old_transactions_that_were_read_are_purged(storage: str) -> None:
    async def scenario(store: SqlStore) -> None:
        old = now() - 100 * SECOND
        stale = [sent() for _ in range(6)]
        # Make the ids as old as the rows: an id has its time.
        for t in stale:
            t.id = (old // 1000).to_bytes(6) + t.id[6:]
        await store.put(stale, old)
        outcomes = [(t.id, "g", State.ROLLED_BACK if n % 2 else State.COMMITTED) for n, t in enumerate(stale[:4])]
        await store.decide(outcomes, old)
        assert await store.retain(now()) == 2, "committed rows wait for a bridge or relay"
        with store.engine.begin() as connection:
            if storage.startswith("mysql"):
                bridge = Member("bridge-x", "bridge", detail={"read_through_us": now()})
                registry.heartbeat(connection, bridge)
            else:
                connection.execute(server_half_message.update().values(relayed=REFUSED))
        if not storage.startswith("mysql"):
            assert await store.retain(now()) == 0, "what a relay's target refuses waits for a person"
            with store.engine.begin() as connection:
                first = server_half_message.c.transaction_id == ids.to_text(stale[0].id)
                connection.execute(server_half_message.update().values(relayed=RELAYED))
                connection.execute(server_half_message.update().where(first).values(relayed=DROPPED))
        assert await store.retain(now()) == 2
        assert await store.retain(now()) == 0
        assert await store.states([t.id for t in stale]) == [None] * 4 + [State.PREPARED] * 2

    use(storage, scenario, retention_us=10 * SECOND)


@pytest.mark.long
def test_relayed_transactions_are_purged_on_every_database(storage: str) -> None:
    """Relayed rows are purged. On MySQL and MariaDB only bridged rows were: with a relay the table grew for ever."""

    async def scenario(store: SqlStore) -> None:
        old = now() - 100 * SECOND
        halves = [sent(committed=True) for _ in range(6)]
        for t in halves:
            t.id = (old // 1000).to_bytes(6) + t.id[6:]
        await store.put(halves, old)

        def mark(*marked: NewTransaction) -> None:
            names = [ids.to_text(t.id) for t in marked]
            with store.engine.begin() as connection:
                moved = server_half_message.update().where(server_half_message.c.transaction_id.in_(names))
                connection.execute(moved.values(relayed=1))
                registry.heartbeat(connection, Member("relay-x", "relay"))

        assert await store.retain(now()) == 0
        mark(*halves[:2])
        with store.engine.connect() as connection:
            assert not movers.has_moved(connection, now())
        assert await store.retain(now()) == 2
        mark(*halves[2:4])
        with store.engine.begin() as connection:
            behind = Member("bridge-x", "bridge", detail={"read_through_us": old - SECOND})
            registry.heartbeat(connection, behind)
        waits_for_bridges = not storage.startswith("sqlite")
        with structlog.testing.capture_logs() as logged:
            assert await store.retain(now()) == (0 if waits_for_bridges else 2)
        events = [line["bridge"] for line in logged if line["event"] == "purge_waits_for_a_bridge"]
        assert events == (["bridge-x"] if waits_for_bridges else [])
        # The bridge was removed for good: once an operator says so, no row waits for it.
        with store.engine.begin() as connection:
            with pytest.raises(Conflict, match="stop it before you remove it"):
                registry.forget(connection, "bridge-x")
            a_week_ago = moment_of(now() - 7 * 86_400 * SECOND)
            connection.execute(server_member.update().values(seen_at=a_week_ago))
            assert [m.name for m in registry.members(connection, with_lost_bridges=True)] == ["bridge-x"]
        assert cli("storage", "forget", "bridge-x", "--storage", storage, "--json") == (0, {"forgotten": "bridge-x"})
        assert "no member" in cli("storage", "forget", "bridge-x", "--storage", storage, "--json")[1]["text"]
        assert await store.retain(now()) == (2 if waits_for_bridges else 0)
        mark(*halves[4:])
        with store.engine.connect() as connection:
            assert movers.has_moved(connection, now())

    use(storage, scenario, retention_us=10 * SECOND)


def test_a_relay_that_was_only_tried_holds_nothing_up(storage: str) -> None:
    """Beside a bridge, purge and key maps waited for a day for the marks of a relay that had stopped."""
    if storage.startswith(("postgresql", "sqlite")):
        pytest.skip("a bridge reads MySQL and MariaDB")

    async def scenario(store: SqlStore) -> None:
        old = now() - 100 * SECOND
        t = sent(committed=True)
        t.id = (old // 1000).to_bytes(6) + t.id[6:]
        await store.put([t], old)

        def seen(name: str, kind: str, seconds_ago: int, **detail: int) -> None:
            with store.engine.begin() as connection:
                registry.heartbeat(connection, Member(name, kind, detail=detail))
                ago = {"seen_at": moment_of(now() - seconds_ago * SECOND)}
                connection.execute(server_member.update().where(server_member.c.name == name).values(ago))

        seen("bridge-x", "bridge", 0, read_through_us=now())
        seen("relay-x", "relay", 10)
        assert await store.retain(now()) == 0, "this one may be on its way"
        seen("relay-x", "relay", 600)
        with store.engine.connect() as connection:
            assert movers.has_moved(connection, old + SECOND)
        assert await store.retain(now()) == 1

    use(storage, scenario, retention_us=10 * SECOND)


def test_a_database_that_refuses_is_not_said_to_be_away(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database(f"sqlite:///{tmp_path}/empty.db", "a")
        with pytest.raises(Unavailable, match=r"refuses it .*no such table"):
            await database.run(lambda connection: connection.exec_driver_sql("SELECT 1 FROM missing"))
        database.close()

    asyncio.run(run())


def test_groups_that_ask_for_checks_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may name as many producer groups as it likes."""
    monkeypatch.setattr(checks, "MOST_GROUPS", 3)
    url = f"sqlite:///{tmp_path}/x.db"
    make_storage(url)

    async def scenario(store: SqlStore) -> None:
        for n in range(10):
            assert await store.claim_checks(f"g{n}", n * SECOND, 5, SECOND) == []
        assert sum(bool(store.next_check_us(f"g{n}")) for n in range(10)) <= 3

    use(url, scenario)
