"""Spark's own connections: to the server, as the user, and with the checks of the audit's other ones, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from notify.errors import InvalidRequest
from notify.runtime.databases import ALL_ROWS
from notify.spark.inputs.databases import Database, schemas_in
from notify.testing.binlog_server import BinlogServer
from notify.testing.postgresql_server import PostgreSqlServer
from tests.support.authority import Authority
from tests.support.databases import own_mariadb, own_mysql
from tests.support.own_server import own_server

BOTH = "127.0.0.1,::1"
SESSION = """
(SELECT concat_ws(' ', current_schema(), current_user, current_setting('application_name'), ssl, client_dn) AS value
 FROM pg_stat_ssl WHERE pid = pg_backend_pid()) session
"""
CIPHER = (
    "(SELECT VARIABLE_VALUE AS value FROM performance_schema.session_status WHERE VARIABLE_NAME = 'Ssl_cipher') cipher"
)
MARIADB_CIPHER = CIPHER.replace("performance_schema", "information_schema")


def of(url: str, **parts: Any) -> str:
    """A URL with other parts, or another query."""
    query = {name: parts.pop(name) for name in list(parts) if name not in ("username", "password", "host", "database")}
    return sa.make_url(url).set(query=query, **parts).render_as_string(hide_password=False)


def read(spark: Any, url: str, query: str, **properties: str) -> str:
    """One value, by a connection of Spark's. `properties` are for the JDBC driver alone."""
    with contextlib.closing(Database(url, "shop")) as database:
        changed = {**database.address.properties, **properties}
        database.address = dataclasses.replace(database.address, properties=changed)
        (row,) = database.read_query(spark, query, "value string").collect()
        return str(row.value)


# --- PostgreSQL -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Secured:
    """A PostgreSQL with TLS: user `certified` needs a certificate, user `auditor` a password."""

    server: PostgreSqlServer
    authority: Authority
    certificate: Path
    key: Path

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    made: list[Secured] = []

    def start(directory: Path) -> PostgreSqlServer:
        directory.chmod(0o755)
        authority = Authority(directory, "us")
        issued, certificate = authority.issue("db", BOTH), authority.issue("certified")
        key = certificate.with_suffix(".key")
        head, mark, tail = certificate.read_text().partition("-----BEGIN PRIVATE KEY-----")
        certificate.write_text(head)
        key.write_text(mark + tail)
        key.chmod(0o600)
        files = {"ssl_cert_file": issued, "ssl_key_file": issued, "ssl_ca_file": authority.file}
        settings = [*(f"{name}={file}" for name, file in files.items()), "ssl=on", f"listen_addresses={BOTH}"]
        server = PostgreSqlServer(directory, durable=False, settings=settings)
        issued.chmod(0o600)
        if server._user:
            shutil.chown(issued, server._user)
        made.append(Secured(server, authority, certificate, key))
        return server.create()

    with own_server("postgresql", start) as server:
        engine = sa.create_engine(server.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in ("CREATE ROLE certified LOGIN", "CREATE ROLE auditor LOGIN PASSWORD 'pass word'"):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql("CREATE SCHEMA tenant")
            connection.exec_driver_sql("GRANT ALL ON SCHEMA tenant TO certified, auditor")
            rules = server.directory / "data" / "pg_hba.conf"
            needs = "".join(f"hostssl all certified {a} cert\nhost all auditor {a} scram-sha-256\n" for a in ADDRESSES)
            rules.write_text(needs + rules.read_text())
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        engine.dispose()
        yield made[0]


ADDRESSES = ("127.0.0.1/32", "::1/128")


def certified(secured: Secured, **query: str) -> str:
    own = {
        "sslmode": "verify-full", "sslrootcert": str(secured.authority.file), "sslcert": str(secured.certificate),
        "sslkey": str(secured.key), "options": "-csearch_path=tenant", "application_name": "audit of ours",
    }  # fmt: skip
    return of(secured.url, username="certified", **own | query)


@pytest.mark.long
def test_all_of_a_url_of_postgresql_reaches_spark(spark: Any, secured: Secured) -> None:
    assert read(spark, certified(secured), SESSION) == "tenant certified audit of ours t /CN=certified"


@pytest.mark.long
@pytest.mark.parametrize("place", ["environment", pytest.param("service", marks=pytest.mark.long)])
def test_settings_from_libpq_files_and_variables_reach_spark(
    place: str, spark: Any, secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = tmp_path / "passwords"
    passwords.write_text(f"127.0.0.1:{secured.server.port}:postgres:auditor:pass word\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    given = {"host": "127.0.0.1", "port": secured.server.port, "user": "auditor", "options": "-csearch_path=tenant"}
    given |= {"sslmode": "verify-ca", "sslrootcert": secured.authority.file}
    if place == "environment":
        for name, value in given.items():
            monkeypatch.setenv(f"PG{name.upper()}", str(value))
        monkeypatch.setenv("PGAPPNAME", "elsewhere")
        url = "postgresql:///postgres"
    else:
        file = tmp_path / "services"
        lines = [f"{name}={value}" for name, value in given.items()]
        file.write_text("\n".join(["[audit]", *lines, "dbname=postgres", "application_name=elsewhere"]))
        monkeypatch.setenv("PGSERVICEFILE", str(file))
        url = "postgresql+psycopg2://?service=audit"
    assert read(spark, url, SESSION) == "tenant auditor elsewhere t"


@pytest.mark.long
def test_a_postgresql_with_another_authority_is_not_read(spark: Any, secured: Secured) -> None:
    other = Authority(secured.authority.directory, "others").file
    with pytest.raises(Exception, match="connect"):
        read(spark, certified(secured), SESSION, sslrootcert=str(other))


@pytest.mark.long
def test_one_of_several_servers_is_read_by_all(spark: Any, secured: Secured) -> None:
    """The first that fits is the audit's: also where another one could be reached later."""
    port = secured.server.port
    query = {"host": ["127.0.0.2:1", f"127.0.0.1:{port}"], "target_session_attrs": "read-write"}
    url = sa.make_url("postgresql+psycopg://postgres@/postgres").update_query_dict(query)
    with contextlib.closing(Database(url.render_as_string(), "shop")) as database:
        assert f"//127.0.0.1:{port}/" in database.address.url
        with database.reading() as connection:
            given = connection.connection.driver_connection.info.get_parameters()
        assert (given["host"], given["port"]) == ("127.0.0.1", str(port))
        database.read_query(spark, SESSION, "value string").collect()


@pytest.mark.parametrize("mode", [pytest.param("prefer", marks=pytest.mark.long), "verify-full"])
def test_postgresql_at_an_address_of_ipv6(mode: str, spark: Any, secured: Secured) -> None:
    url = certified(secured, sslmode=mode).replace("127.0.0.1", "[::1]")
    assert read(spark, url, SESSION).startswith("tenant certified")


@pytest.mark.long
def test_names_of_databases_and_passwords_are_written_as_they_are(spark: Any, secured: Secured) -> None:
    name = "sh/op?a=b c%20d+ü"
    engine = sa.create_engine(secured.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql('CREATE DATABASE "{}"'.format(name.replace("%", "%%")))
    engine.dispose()
    url = of(secured.url, username="auditor", password="pass word", database=name)
    assert read(spark, url, "(SELECT current_database() AS value) q") == name


# --- MySQL and MariaDB ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def mysql(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BinlogServer]:
    authority = Authority(tmp_path_factory.mktemp("authority"), "us")
    issued = authority.issue("db", BOTH)
    files = [f"--ssl-ca={authority.file}", f"--ssl-cert={issued}", f"--ssl-key={issued}", f"--bind-address={BOTH}"]
    with (own_mysql if request.param == "mysql" else own_mariadb)(files) as server:
        server.execute("CREATE USER shop@'::1' IDENTIFIED BY 'shop'", "GRANT ALL ON *.* TO shop@'::1'")
        yield server


def authority_of(server: BinlogServer) -> str:
    return next(option.partition("=")[2] for option in server._options if option.startswith("--ssl-ca"))


def cipher(server: BinlogServer) -> str:
    return CIPHER if type(server).__name__ == "MySqlServer" else MARIADB_CIPHER


def folder_of(file: str, to: Path) -> str:
    """A folder with a file of authorities, as OpenSSL looks for it."""
    import subprocess

    shutil.copy(file, to)
    subprocess.run(["openssl", "rehash", to], check=True)
    return str(to)


@pytest.mark.long
@pytest.mark.parametrize("given", [pytest.param("", marks=pytest.mark.long), "file", "folder"])
def test_a_server_that_demands_tls_is_read(given: str, spark: Any, mysql: BinlogServer, tmp_path: Path) -> None:
    query = {"file": {"ssl_ca": authority_of(mysql)}, "folder": {}, "": {}}[given]
    if given == "folder":
        query["ssl_capath"] = folder_of(authority_of(mysql), tmp_path)
    mysql.execute("SET GLOBAL require_secure_transport = ON")
    try:
        assert read(spark, of(mysql.url, **query), cipher(mysql)).startswith("TLS")
    finally:
        mysql.execute("SET GLOBAL require_secure_transport = OFF")


def test_rows_are_encrypted_where_a_server_offers_it(spark: Any, mysql: BinlogServer) -> None:
    assert read(spark, mysql.url, cipher(mysql)).startswith("TLS")
    mysql.execute("FLUSH PRIVILEGES")  # the server forgets who has logged in: each has to prove its password
    assert read(spark, of(mysql.url, ssl_disabled="true"), cipher(mysql)) == ""


def test_a_server_with_another_authority_is_not_read(spark: Any, mysql: BinlogServer, tmp_path: Path) -> None:
    """PyMySQL would have refused it before; Spark must not read on without a check."""
    other = Authority(tmp_path, "others").file.read_text()
    with pytest.raises(Exception, match="connect"):
        read(spark, of(mysql.url, ssl_ca=authority_of(mysql)), cipher(mysql), serverSslCert=other)


@pytest.mark.long
def test_mysql_at_an_address_of_ipv6(spark: Any, mysql: BinlogServer) -> None:
    for query in ({}, {"ssl_ca": authority_of(mysql)}):
        url = of(mysql.url, host="::1", sql_mode="ANSI", **query)
        mode = read(spark, url, "(SELECT concat(current_user(), ' ', @@sql_mode) AS value) q")
        assert mode.startswith("shop@::1") and "ANSI_QUOTES" in mode


@pytest.mark.long
def test_a_limit_of_the_server_for_its_other_clients_cuts_no_rows_off(spark: Any, mysql: BinlogServer) -> None:
    mysql.execute("SET GLOBAL sql_select_limit = 2")
    try:
        for url in (mysql.url, of(mysql.url, sql_mode="ANSI")):
            assert read(spark, url, "(SELECT @@SESSION.sql_select_limit AS value) q") == str(ALL_ROWS)
    finally:
        mysql.execute("SET GLOBAL sql_select_limit = DEFAULT")


def test_a_url_without_a_database_needs_a_schema(spark: Any, mysql: BinlogServer) -> None:
    mysql.execute("CREATE DATABASE IF NOT EXISTS t_one", "CREATE TABLE IF NOT EXISTS t_one.notify_inbox (id int)")
    url = of(mysql.url, database="")
    with pytest.raises(InvalidRequest, match="no schema, or no database: name the one of the service's tables with --"):
        Database(url, "shop")
    assert schemas_in(url, "--database shop", "t_*") == ["t_one"]
    mysql.execute("DROP DATABASE t_one")
    assert read(spark, of(mysql.url), "(SELECT DATABASE() AS value) q") == "shop"


# --- SQLite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?mode=ro&uri=true"])
def test_a_file_of_sqlite_is_read_whatever_its_name_is(query: str, spark: Any, tmp_path: Path) -> None:
    file = tmp_path / "a?mode=memory #1 %41.db"
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(file)))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE told (value TEXT)")
        connection.exec_driver_sql("INSERT INTO told VALUES ('here')")
    engine.dispose()
    name = f"file:{quote(str(file))}" if query else str(file)
    url = "sqlite:///" + name.replace("%", "%25").replace("?", "%3F").replace("#", "%23") + query
    assert read(spark, url, "(SELECT value FROM told) q") == "here"


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "mysql+pymysql://shop@localhost/shop?unix_socket=/run/mysqld.sock",
        "postgresql+psycopg:///shop?host=/run/postgresql",
        "postgresql+psycopg:///shop?host=%2Frun%2Fa,%2Frun%2Fb",
    ],
)
def test_a_socket_is_refused(url: str) -> None:
    """Spark would read the server that listens at the usual port."""
    with pytest.raises(InvalidRequest, match="Spark reads by TCP: write the server's host and port into the URL"):
        Database(url, "shop")


def test_a_socket_of_the_environment_is_refused(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", str(secured.server.directory))
    monkeypatch.setenv("PGPORT", str(secured.server.port))
    with pytest.raises(InvalidRequest, match="--database shop: Spark reads by TCP: write the server's host and port"):
        Database("postgresql://postgres@/postgres", "shop")
