"""Several candidates for one source: what is wrong with one of them is not wrong with all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

from notify.binlog_bridge.binlog import rights
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.candidates import Candidates
from notify.binlog_bridge.errors import Purged, Unfit
from notify.client import create_tables
from notify.errors import NotifyError
from notify.testing import InMemoryServer
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from tests.support.bridges import numbers, outbox
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.databases import own_mariadb, own_mysql
from tests.support.groups import subscribe


@pytest.fixture
def url(binlog_url: str) -> URL:
    return sa.make_url(binlog_url)


@contextlib.contextmanager
def user(server: BinlogServer, *statements: str, name: str = "few") -> Iterator[None]:
    """A user with the password `few`; `statements` with {} for the account give it rights, or take its login away."""
    account = f"'{name}'@'127.0.0.1'"
    server.execute(f"CREATE USER {account} IDENTIFIED BY 'few'", *(each.format(account) for each in statements))
    try:
        yield
    finally:
        server.execute(f"DROP USER {account}")


def text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def move(urls: list[str], server: ServerProcess, **options: object) -> Bridge:
    """Move what is in the source now; raises TimeoutError if the bridge tries for ever."""
    bridge = Bridge(urls, server.url, **options)  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(bridge.run(once=True), PATIENCE_SECONDS))
    return bridge


ON_DATABASE = "GRANT ALL ON {database}.* TO {{}}"
READS = "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {}"
BROKEN = {
    "wrong password": ((), {"password": "wrong"}, "the password is wrong"),
    "no such database": ((), {"database": "nosuch"}, "no such database|no right to this database"),
    "locked": (("ALTER USER {} ACCOUNT LOCK",), {}, "ACCOUNT UNLOCK"),
    "expired": (("ALTER USER {} PASSWORD EXPIRE",), {}, "password has expired"),
    "rights of one database": ((), {}, r"GRANT REPLICATION SLAVE ON \*\.\*"),
    "no tables": (("GRANT SELECT ON mysql.* TO {}", READS), {"database": "mysql"}, "there is neither half_message"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", BROKEN)
def test_a_candidate_that_is_refused_is_passed_over(
    kind: str, url: URL, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """The bridge ended at the first one, although the second was sound; a locked user was tried for ever."""
    subscribe(server.url, unique, unique)
    outbox(text(url), unique, range(2))
    statements, changed, said = BROKEN[kind]
    on_database = ON_DATABASE.format(database=url.database)
    with user(binlog_server, on_database, *statements):
        broken = text(url.set(username="few", password="few").set(**changed))  # type: ignore[arg-type]
        assert move([broken, text(url)], server).totals.stored == 2
        assert numbers(server, unique, 2) == [0, 1]
        with pytest.raises(Unfit, match=said):
            move([broken], server, name=unique)
        with pytest.raises(
            Unfit, match=rf"(?s)none of this source's candidates.*{said}.*user or the password is wrong"
        ):
            move([broken, text(url.set(password="wrong"))], server, name=unique)


@pytest.mark.long
def test_one_that_does_not_answer_is_not_refused(url: URL, server: ServerProcess, unique: str) -> None:
    """It may return, so the bridge keeps asking it beside one that is refused."""
    outbox(text(url), unique, range(2))
    bridge = Bridge([text(url.set(password="wrong")), text(url.set(port=9))], server.url)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(bridge.run(), 2.0))


def test_the_reasons_of_candidates_that_worked_since_are_forgotten() -> None:
    now = [0.0]
    engines = [sa.create_engine(f"mysql+pymysql://u:s3cret@127.0.0.1:{port}/shop") for port in (1, 2)]
    candidates = Candidates(engines, purged_seconds=30.0, clock=lambda: now[0])
    candidates.refuse(Unfit("locked"))
    candidates.works()
    candidates.refuse(Purged("gone"))  # only the second one is refused now
    candidates.does_not_answer()  # the first
    assert candidates.engine is engines[1]
    with pytest.raises(Purged, match="gone"):
        Candidates(engines[:1], clock=lambda: now[0]).refuse(Purged("gone"))


def test_candidates_that_may_catch_up_are_waited_for() -> None:
    """A replica that is behind lacks the position for a while. Once every reason has lasted, all of them are said."""
    now = [0.0]
    engines = [sa.create_engine(f"mysql+pymysql://u:s3cret@127.0.0.1:{port}/shop") for port in (1, 2)]
    candidates = Candidates(engines, purged_seconds=30.0, clock=lambda: now[0])
    refusals: list[Callable[[], NotifyError]] = [lambda: Unfit("locked"), lambda: Purged("gone")]
    for _ in range(3):
        for refusal in refusals:
            candidates.refuse(refusal())
            now[0] += 5.0
    now[0] = 31.0
    with pytest.raises(Unfit, match=r"(?s)none of .*127.0.0.1:1/shop: locked.*127.0.0.1:2/shop: gone") as raised:
        candidates.refuse(Unfit("locked"))
    assert "s3cret" not in str(raised.value)


def test_a_right_that_is_lost_before_the_binlog_is_read_ends_it(
    url: URL, binlog_server: BinlogServer, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's refusal of the binlog itself was taken for one that passes, and met again and again."""
    outbox(text(url), unique, range(2))
    monkeypatch.setattr(rights, "may_read_binlog", lambda connection: True)
    with user(binlog_server, ON_DATABASE.format(database=url.database)):
        with pytest.raises(Unfit, match=r"the source refuses to be read"):
            move([text(url.set(username="few", password="few"))], server)


def test_another_database_is_not_a_candidate(
    url: URL, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """Two databases without names are candidates of one source: the second one's rows would go to the first's."""
    outbox(text(url), unique, range(2))
    other = url.set(database=f"{url.database}_other")
    binlog_server.execute(f"CREATE DATABASE {other.database} CHARACTER SET utf8mb4")
    engine = sa.create_engine(other)
    try:
        create_tables(engine)
        bridge = Bridge([text(url), text(other)], server.url)

        async def run() -> None:
            await bridge._prepare(fill=False)
            bridge._candidates.does_not_answer()
            with pytest.raises(Unfit, match="is another database and not a replica"):
                await bridge._prepare(fill=False)

        asyncio.run(run())
    finally:
        engine.dispose()
        binlog_server.execute(f"DROP DATABASE {other.database}")


def test_the_doctor_says_what_is_wrong_with_each(url: URL, memory: InMemoryServer, unique: str) -> None:
    outbox(text(url), unique, range(2))
    broken = text(url.set(password="s3cret"))
    words = ("doctor", "--url", memory.url, "--json", "--bridge", "--dsn", text(url), "--dsn", broken)
    code, answer = cli(*words)
    shown = str(sa.make_url(broken))
    assert code == 1 and "s3cret" not in str(answer)
    assert ["password is wrong" in each for each in answer["databases"][shown]["findings"]] == [True]
    assert any(each.startswith(shown) and "password is wrong" in each for each in answer["findings"])


# --- on two servers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(binlog_server: BinlogServer) -> Iterator[BinlogServer]:
    """Another server of the same kind, with which the first has nothing in common."""
    own = own_mysql if isinstance(binlog_server, MySqlServer) else own_mariadb
    with own(["--server-id=2"]) as server:
        yield server


def at(server: BinlogServer, database: str) -> URL:
    return sa.make_url(server.url).set(database=database)


@pytest.fixture
def replica(url: URL, second: BinlogServer, binlog_server: BinlogServer) -> Iterator[BinlogServer]:
    second.promote()
    second.forget_binlogs()
    if not isinstance(second, MySqlServer):
        second.execute("SET GLOBAL gtid_slave_pos = ''")
    second.follow(binlog_server)
    yield second
    second.promote()
    second.execute("SET sql_log_bin = 0", f"DROP DATABASE IF EXISTS {url.database}")
    second.restore_variables()


@pytest.mark.long
def test_settings_of_one_candidate_are_not_those_of_another(
    url: URL, replica: BinlogServer, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    outbox(text(url), unique, range(2))
    replica.wait_until_it_has(binlog_server.gtids)
    replica.execute("SET GLOBAL binlog_row_image = 'MINIMAL'")
    assert move([text(at(replica, str(url.database))), text(url)], server).totals.stored == 2


@pytest.mark.long
def test_a_candidate_that_purged_the_position_is_passed_over(
    url: URL, replica: BinlogServer, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """And where all of them lack it, the bridge says so of each."""
    subscribe(server.url, unique, unique)
    outbox(text(url), unique, range(2))
    assert move([text(url)], server).totals.stored == 2
    outbox(text(url), unique, range(2, 3))
    replica.wait_until_it_has(binlog_server.gtids)
    urls = [text(at(replica, str(url.database))), text(url)]
    purge(replica)
    assert move(urls, server).totals.stored == 1
    assert numbers(server, unique, 3) == [0, 1, 2]
    outbox(text(url), unique, range(4, 5))
    replica.wait_until_it_has(binlog_server.gtids)
    purge(replica)
    purge(binlog_server)
    with pytest.raises(Purged, match=r"(?s)none of this source's candidates can be read:\n- .*\n- "):
        move(urls, server, purged_seconds=0.0)


def purge(server: BinlogServer) -> None:
    """Delete all binlogs but the newest; a file that is sent to somebody still is kept by the server for a while."""

    def is_done() -> bool:
        files = server.execute("SHOW BINARY LOGS")
        server.execute(f"PURGE BINARY LOGS TO '{files[-1][0]}'")
        return len(server.execute("SHOW BINARY LOGS")) == 1

    server.execute("FLUSH BINARY LOGS")
    eventually(is_done, "the older binlogs to be gone")
