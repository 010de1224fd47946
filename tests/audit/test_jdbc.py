"""Spark's own connections to a MySQL: encrypted and checked as the audit's other ones are, and to the same server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from notify.errors import InvalidRequest
from notify.spark import jdbc
from notify.spark.databases import Database
from notify.testing.mysql_server import MySqlServer
from tests.support.databases import own_mysql

CIPHER = (
    "(SELECT VARIABLE_VALUE AS value FROM performance_schema.session_status WHERE VARIABLE_NAME = 'Ssl_cipher') cipher"
)


@pytest.fixture(scope="module")
def mysql() -> Iterator[MySqlServer]:
    with own_mysql() as server:
        yield server


def of(server: MySqlServer, **query: str) -> str:
    return sa.make_url(server.url).set(query=query).render_as_string(hide_password=False)


def read(spark: Any, server: MySqlServer, url: str, query: str) -> str:
    """One value, by a connection of Spark's."""
    with contextlib.closing(Database(url, "shop")) as database:
        server.execute("FLUSH PRIVILEGES")  # the server forgets who has logged in: each has to prove its password
        (row,) = database._jdbc(spark, query, "value string").collect()
        return str(row.value)


@pytest.mark.parametrize("query", [{}, {"ssl_ca": "ca.pem", "ssl_check_hostname": "false"}])
def test_a_server_that_demands_tls_is_read(spark: Any, mysql: MySqlServer, query: dict[str, str]) -> None:
    if "ssl_ca" in query:
        query = query | {"ssl_ca": str(mysql.directory / "data" / query["ssl_ca"])}
    mysql.execute("SET GLOBAL require_secure_transport = ON")
    try:
        assert read(spark, mysql, of(mysql, **query), CIPHER).startswith("TLS")
    finally:
        mysql.execute("SET GLOBAL require_secure_transport = OFF")


def test_rows_are_encrypted_where_a_server_offers_it(spark: Any, mysql: MySqlServer) -> None:
    assert read(spark, mysql, of(mysql), CIPHER).startswith("TLS")
    assert read(spark, mysql, of(mysql, ssl_disabled="true"), CIPHER) == ""


def test_a_server_with_another_authority_is_not_read(spark: Any, mysql: MySqlServer) -> None:
    """PyMySQL would have refused it before; Spark must not read on without a check."""
    data = mysql.directory / "data"
    with contextlib.closing(Database(of(mysql), "shop")) as database:
        database.url = sa.make_url(of(mysql, ssl_ca=str(data / "client-cert.pem"), ssl_check_hostname="false"))
        with pytest.raises(Exception, match="connect"):
            database._jdbc(spark, CIPHER, "value string").collect()


@pytest.mark.parametrize(
    "url",
    [
        "mysql+pymysql://shop@localhost/shop?unix_socket=/run/mysqld.sock",
        "postgresql+psycopg:///shop?host=/run/postgresql",
    ],
)
def test_a_socket_is_refused(url: str) -> None:
    """Spark would read the server that listens at the usual port."""
    with pytest.raises(InvalidRequest, match="--database shop: Spark reads by TCP: write the server's host and port"):
        Database(url, "shop")


def test_the_tls_of_a_url_is_that_of_its_reads() -> None:
    def properties(url: str) -> dict[str, str]:
        address = jdbc._address(sa.make_url(url), sa.make_url(url).get_backend_name(), encrypted=True)[1]
        return {name: value for name, value in address.items() if name.startswith(("ssl", "serverSsl"))}

    assert properties("mysql://h/d") == {"sslMode": "trust"}
    assert properties("mysql://h/d?ssl_ca=/ca") == {"sslMode": "verify-full", "serverSslCert": "/ca"}
    unnamed = properties("mysql://h/d?ssl_ca=/ca&ssl_check_hostname=false")
    assert unnamed == {"sslMode": "verify-ca", "serverSslCert": "/ca"}
    assert properties("mysql://h/d?ssl_verify_identity=true") == {"sslMode": "verify-full"}
    assert properties("mysql://h/d?ssl_capath=/cas") == {"sslMode": "verify-full"}
    checked = properties("postgresql://h/d?sslmode=verify-full&sslrootcert=/ca")
    assert checked == {"sslmode": "verify-full", "sslrootcert": "/ca"}
