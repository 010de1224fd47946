"""`notify doctor` on MySQL, MariaDB and Galera: what may be lost or seen too late, and the statement that mends it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from notify.binlog_bridge.binlog import source
from notify.client import create_tables
from notify.runtime.databases import is_gone
from notify.storage.sql import checkup, schema
from notify.storage.sql.engines import open_engine
from notify.testing import InMemoryServer
from notify.testing.binlog_server import BinlogServer
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.bridges import move, outbox
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.databases import own_mariadb, own_mysql
from tests.support.own_server import own_server

_PROVIDERS = [Path("/usr/lib/galera/libgalera_smm.so"), Path("/usr/lib/libgalera_smm.so")]


class GaleraCluster:
    """Two nodes with the same data; every database made later is on both."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups = [free_port(), free_port()]
        self.nodes: list[MariaDbServer] = []

    def start(self) -> GaleraCluster:
        """Skips the test with the reason if Galera is not installed."""
        provider = next((path for path in _PROVIDERS if path.exists()), None)
        if provider is None:
            pytest.skip("no Galera: Debian's package galera-4 is not installed")
        first, second = self._directory / "1", self._directory / "2"
        first.mkdir()
        MariaDbServer(first, durable=False).create().stop()
        founder = self._node(provider, 0, ["--wsrep-new-cluster"])
        founder.start()
        founder.stop()  # its data then says which cluster it belongs to, and a copy needs no transfer of the state
        shutil.copytree(first, second)
        # Even then a program of root hands over the position, as the user nobody.
        for place in (self._directory, second, second / "data"):
            place.chmod(0o777)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            for at in (0, 1):
                node = self._node(provider, at, [] if at else ["--wsrep-new-cluster"])
                self.nodes.append(node)
                node.start()
            eventually(lambda: state(self.nodes[0], "wsrep_cluster_size") == "2", "the nodes to meet")
            unless_ready.pop_all()
        return self

    def _node(self, provider: Path, at: int, options: Sequence[str]) -> MariaDbServer:
        port = self._groups[at]
        settings = [
            "--wsrep-on=ON", f"--wsrep-provider={provider}", "--innodb-autoinc-lock-mode=2",
            f"--wsrep-cluster-address=gcomm://127.0.0.1:{self._groups[0]},127.0.0.1:{self._groups[1]}",
            "--wsrep-node-address=127.0.0.1", f"--wsrep-sst-receive-address=127.0.0.1:{free_port()}",
            f"--wsrep-provider-options=base_host=127.0.0.1;base_port={port};gcache.size=16M;"
            f"gmcast.listen_addr=tcp://127.0.0.1:{port};ist.recv_addr=127.0.0.1:{free_port()}",
        ]  # fmt: skip
        return MariaDbServer(self._directory / str(at + 1), at + 1, [*settings, *options], durable=False)

    def stop(self) -> None:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.kill)


def told(node: MariaDbServer, statement: str) -> list[tuple[Any, ...]]:
    """The rows of a SHOW or SET: a node that is cut off takes no other statement, which SQLAlchemy begins with."""
    with (
        pymysql.connect(
            host="127.0.0.1", port=node.port, user=node.USER, password="shop", autocommit=True
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return list(cursor.fetchall())


def state(node: MariaDbServer, name: str) -> str:
    """A status variable of a node."""
    return str(told(node, f"SHOW GLOBAL STATUS LIKE '{name}'")[0][1])


@contextmanager
def galera_cluster() -> Iterator[GaleraCluster]:
    with own_server("galera", lambda directory: GaleraCluster(directory).start()) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def own(request: pytest.FixtureRequest) -> Iterator[BinlogServer]:
    """A server with the tables of a service in its database, and with settings that doctor finds nothing wrong with."""
    options = ["--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1"]
    with own_mysql(options) if request.param == "mysql" else own_mariadb(options) as server:
        engine = sa.create_engine(server.url)
        create_tables(engine)
        engine.dispose()
        yield server


@pytest.fixture(scope="module")
def memory() -> Iterator[InMemoryServer]:
    """A server of this module's own: what other tests leave undone in theirs are findings, too."""
    from notify.testing.server import InMemoryServer

    with InMemoryServer() as server:
        yield server


def doctor(memory: InMemoryServer, *urls: str, bridge: bool = False) -> dict[str, Any]:
    words = [word for url in urls for word in ("--dsn", url)]
    return cli("doctor", "--url", memory.url, "--json", *words, *(["--bridge"] if bridge else []))[1]


def about(answer: Mapping[str, Any], words: str) -> list[str]:
    return [each for each in answer["findings"] if words in each]


@pytest.mark.long
def test_nothing_is_wrong(own: BinlogServer, memory: InMemoryServer) -> None:
    assert doctor(memory, own.url)["findings"] == doctor(memory, own.url, bridge=True)["findings"] == []


BOTH = {
    "innodb_flush_log_at_trx_commit": ("2", "1", "lose commits"),
    "sync_binlog": ("100", "1", "lack what was acknowledged"),
    "binlog_expire_logs_seconds": ("3600", "0", "--backfill"),
    "init_connect": ("'SET sql_log_bin = 0'", "''", "may miss what they write"),
}
MYSQL = {
    "binlog_error_action": ("'IGNORE_ERROR'", "'ABORT_SERVER'", "continues without a binlog"),
    "transaction_isolation": ("'READ-UNCOMMITTED'", "'REPEATABLE-READ'", "may still roll back"),
}
MARIADB = {"tx_isolation": ("'READ-UNCOMMITTED'", "'REPEATABLE-READ'", "may still roll back")}


@pytest.mark.long
@pytest.mark.parametrize("name", [*BOTH, *MYSQL, *MARIADB])
def test_a_setting_that_risks_messages_is_named(own: BinlogServer, memory: InMemoryServer, name: str) -> None:
    settings = BOTH | (MYSQL if isinstance(own, MySqlServer) else MARIADB)
    if name not in settings:
        pytest.skip("the other server's name for it")
    bad, good, leads_to = settings[name]
    own.execute(f"SET GLOBAL {name} = {bad}")
    try:
        (finding,) = doctor(memory, own.url, bridge=True)["findings"]
        assert name in finding and leads_to in finding
        if name != "init_connect":
            own.execute(f"SET GLOBAL {finding.partition('SET GLOBAL ')[2].split(',')[0]}")
            assert doctor(memory, own.url, bridge=True)["findings"] == []
    finally:
        own.execute(f"SET GLOBAL {name} = {good}")
    assert doctor(memory, own.url, bridge=True)["findings"] == []


@pytest.mark.long
def test_a_standby_is_named_unless_it_is_a_bridge_s_candidate(own: BinlogServer, memory: InMemoryServer) -> None:
    name = "super_read_only" if isinstance(own, MySqlServer) else "read_only"
    own.execute(f"SET GLOBAL {name} = ON")
    try:
        (finding,) = doctor(memory, own.url)["findings"]
        assert f"{name} is on: this server takes no writes" in finding
        assert doctor(memory, own.url, bridge=True)["findings"] == []
    finally:
        own.execute("SET GLOBAL read_only = OFF")


@pytest.mark.long
def test_tables_are_made_where_each_needs_a_primary_key(own: BinlogServer, memory: InMemoryServer) -> None:
    if not isinstance(own, MySqlServer):
        pytest.skip("a variable of MySQL")
    own.execute("SET GLOBAL sql_require_primary_key = ON", "CREATE DATABASE keyed CHARACTER SET utf8mb4")
    url = sa.make_url(own.url).set(database="keyed").render_as_string(hide_password=False)
    try:
        engine = open_engine(url)
        schema.upgrade(engine, "main")
        create_tables(engine)
        engine.dispose()
    finally:
        own.execute("SET GLOBAL sql_require_primary_key = OFF", "DROP DATABASE keyed")


def test_a_database_without_a_redo_log_is_named(own: BinlogServer, memory: InMemoryServer) -> None:
    if not isinstance(own, MySqlServer):
        pytest.skip("a statement of MySQL")
    own.execute("ALTER INSTANCE DISABLE INNODB REDO_LOG")
    (finding,) = doctor(memory, own.url)["findings"]
    assert (
        finding == "InnoDB writes no redo log: a crash loses the whole database: ALTER INSTANCE ENABLE INNODB REDO_LOG"
    )
    own.execute(finding.rpartition(": ")[2])
    assert doctor(memory, own.url)["findings"] == []


# --- started with other options ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def replica(request: pytest.FixtureRequest) -> Iterator[BinlogServer]:
    """A replica that does not log what it takes, has several workers without an order, and no doublewrite."""
    options = ["--server-id=2", "--innodb-doublewrite=OFF", "--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1"]
    mysql = ["--log-replica-updates=OFF", "--replica-parallel-workers=4", "--replica-preserve-commit-order=OFF"]
    with ExitStack() as stack:
        if request.param == "mysql":
            primary: BinlogServer = stack.enter_context(own_mysql())
            follower: BinlogServer = stack.enter_context(own_mysql([*options, *mysql]))
        else:
            primary = stack.enter_context(own_mariadb())
            follower = stack.enter_context(own_mariadb([*options, "--log-slave-updates=OFF"]))
        engine = sa.create_engine(primary.url)
        create_tables(engine)
        engine.dispose()
        follower.follow(primary)
        follower.wait_until_it_has(primary.gtids)
        yield follower


@pytest.mark.long
def test_faults_of_a_replica_are_named(replica: BinlogServer, memory: InMemoryServer) -> None:
    """log_replica_updates was looked at on MariaDB only."""
    answer = doctor(memory, replica.url, bridge=True)
    assert len(about(answer, "innodb_doublewrite is OFF")) == 1
    assert len(about(answer, "_updates is OFF: the binlog lacks what")) == 1
    is_mysql = isinstance(replica, MySqlServer)
    assert len(about(answer, "replica_preserve_commit_order is OFF on a replica with several workers")) == is_mysql
    assert len(answer["findings"]) == 2 + is_mysql
    engine = sa.create_engine(replica.url)
    with engine.connect() as connection:
        stops = [finding.what for finding in source.findings(connection, 4711) if finding.stops]
    engine.dispose()
    assert ["log_replica_updates" in what for what in stops] == ([True] if is_mysql else [])


# --- clusters ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def galera() -> Iterator[GaleraCluster]:
    with galera_cluster() as cluster:
        engine = open_engine(cluster.nodes[0].url)
        schema.upgrade(engine, "main")
        engine.dispose()
        yield cluster


@pytest.mark.long
def test_a_galera_cluster_is_told_to_write_at_one_node(galera: GaleraCluster, memory: InMemoryServer) -> None:
    """Reads that are not causal, writers at several nodes, and nodes that were not looked at."""
    first, second = galera.nodes
    alone = doctor(memory, first.url)["findings"]
    assert [each.partition(":")[0] for each in alone] == [
        "wsrep_sync_wait is 0",
        "1 of the 2 nodes of a Galera cluster were checked",
    ]
    both = doctor(memory, first.url, second.url)
    (writers,) = about(both, "2 nodes of one Galera cluster take writes")
    assert "SET GLOBAL read_only = ON on all nodes but the one" in writers and "shop:shop" not in str(both)
    second.execute("SET GLOBAL read_only = ON")
    for node in galera.nodes:
        node.execute("SET GLOBAL wsrep_sync_wait = 7")
    findings = doctor(memory, first.url, second.url)["findings"]
    assert [each.partition(": ")[2] for each in findings] == [
        "read_only is on: this server takes no writes: name the primary; if this is to be the primary, end its "
        "replication, then SET GLOBAL read_only = OFF"
    ]


@pytest.mark.long
def test_a_bridge_reads_a_node_of_galera(galera: GaleraCluster, server: ServerProcess, unique: str) -> None:
    """All that both nodes wrote is in each node's binlog; only without wsrep_gtid_mode no other node can continue."""
    first, second = galera.nodes
    second.execute("SET GLOBAL read_only = OFF")
    first.execute(f"CREATE DATABASE {unique} CHARACTER SET utf8mb4")
    urls = [sa.make_url(node.url).set(database=unique).render_as_string(hide_password=False) for node in galera.nodes]
    outbox(urls[0], unique, range(2))
    outbox(urls[1], unique, range(4, 6))
    assert move(urls[0], server).totals.stored == 4
    engine = sa.create_engine(urls[0])
    with engine.connect() as connection:
        assert [f for f in source.findings(connection, 4711) if "wsrep_gtid_mode is OFF" in f.what and not f.stops]
        assert checkup.node(connection, "first") is not None
    engine.dispose()


@pytest.mark.long
def test_a_node_that_is_cut_off_is_named(galera: GaleraCluster, memory: InMemoryServer) -> None:
    """It refuses every statement on a table, and doctor said that the tables are missing."""
    first, second = galera.nodes
    first.execute("SET GLOBAL wsrep_sync_wait = 0")
    second.freeze()
    try:
        eventually(lambda: state(first, "wsrep_cluster_status") != "Primary", "the node to notice that it is alone")
        for wait, code in ((0, "1047"), (7, "1205")):
            told(first, f"SET GLOBAL wsrep_sync_wait = {wait}, GLOBAL innodb_lock_wait_timeout = 1")
            (finding,) = about(doctor(memory, first.url), "A node of Galera does so while it is cut off")
            assert code in finding
        told(first, "SET GLOBAL wsrep_sync_wait = 0")
        engine = sa.create_engine(first.url)
        with pytest.raises(sa.exc.OperationalError) as raised:
            engine.connect()
        assert is_gone(raised.value.orig)  # servers and relays try again
    finally:
        second.thaw()
    eventually(lambda: state(first, "wsrep_cluster_size") == "2", "the nodes to meet again")


@pytest.fixture(scope="module")
def group() -> Iterator[MySqlServer]:
    """A group of Group Replication with one member."""
    with own_mysql(["--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1"]) as server:
        address = f"127.0.0.1:{free_port()}"
        server.execute(
            "INSTALL PLUGIN group_replication SONAME 'group_replication.so'",
            "SET GLOBAL group_replication_group_name = '11111111-2222-3333-4444-555555555555'",
            f"SET GLOBAL group_replication_local_address = '{address}'",
            f"SET GLOBAL group_replication_group_seeds = '{address}'",
            "SET GLOBAL group_replication_bootstrap_group = ON",
            "START GROUP_REPLICATION",
        )
        engine = sa.create_engine(server.url)
        create_tables(engine)
        engine.dispose()
        yield server


@pytest.mark.long
def test_a_group_with_several_writers_or_stale_reads_is_named(group: MySqlServer, memory: InMemoryServer) -> None:
    assert doctor(memory, group.url)["findings"] == []
    group.execute("SET GLOBAL group_replication_consistency = 'EVENTUAL'")
    (finding,) = doctor(memory, group.url)["findings"]
    assert "group_replication_consistency is EVENTUAL" in finding
    group.execute(finding.rpartition(": ")[2], "SELECT group_replication_switch_to_multi_primary_mode()")
    (finding,) = doctor(memory, group.url)["findings"]
    assert "every member of this replication group takes writes" in finding
    group.execute(finding.rpartition(": ")[2])
    assert doctor(memory, group.url)["findings"] == []


@pytest.mark.long
def test_a_bridge_reads_a_member_of_a_group(group: MySqlServer, server: ServerProcess, unique: str) -> None:
    outbox(group.url, unique, range(2))
    assert move(group.url, server).totals.stored == 2
