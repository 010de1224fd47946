"""A database's URL for the JDBC driver: each option is passed on, refused, or left out since nothing depends on it."""

from __future__ import annotations

import re
import ssl
import warnings
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

pytest.importorskip("pyspark")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from pymysql.connections import Connection as MySqlConnection

from notify.errors import InvalidRequest
from notify.spark.inputs import jdbc_urls
from notify.spark.inputs.jdbc_urls import Reached
from tests.support.authority import Authority

DB = Reached("db.example", "192.0.2.1", 5432, "shop", "auditor", "s3cret")
HERE = Reached("localhost", "::1", 5432, "shop", "auditor", "")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "audit-spark.md").read_text()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".postgresql").mkdir()
    return tmp_path


def properties(given: dict[str, str], reached: Reached = DB) -> dict[str, str]:
    found = dict(jdbc_urls.of_postgresql(given, reached, "--database shop").properties)
    return {name: value for name, value in found.items() if name not in ("user", "password")}


# --- PostgreSQL -------------------------------------------------------------------------------------------------


def test_server_and_login_are_those_that_were_reached() -> None:
    address = jdbc_urls.of_postgresql({"host": "other.example", "service": "x", "passfile": "/p"}, DB, "")
    assert address.url == "jdbc:postgresql://db.example:5432/shop?prepareThreshold=-1"
    assert address.properties == {"user": "auditor", "password": "s3cret"}


def test_names_are_written_as_a_url_needs_them() -> None:
    odd = DB._replace(host="2001:db8::7", address="2001:db8::7", database="a/b?c d%ü+")
    assert jdbc_urls.of_postgresql({}, odd, "").url == (
        "jdbc:postgresql://[2001:db8:0:0:0:0:0:7]:5432/a%2Fb%3Fc%20d%25%C3%BC%2B?prepareThreshold=-1"
    )
    with pytest.raises(InvalidRequest, match="fe80::1%eth0 is an address of this machine's network card: write the"):
        jdbc_urls.of_postgresql({}, DB._replace(host="fe80::1%eth0", address="fe80::1"), "--database shop")


def test_a_home_that_cannot_be_looked_into_has_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `sudo` without -H, or for a user without one: libpq connects there."""
    monkeypatch.setenv("HOME", "/" + "x" * 5000)
    assert properties({}) == {}
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert properties({"sslmode": "require"}) == {"sslmode": "require"}


def test_localhost_is_the_one_of_two_addresses_that_was_reached() -> None:
    assert "//[0:0:0:0:0:0:0:1]:5432/" in jdbc_urls.of_postgresql({}, HERE, "").url
    named = jdbc_urls.of_postgresql({"sslmode": "verify-full"}, HERE, "")
    assert "//localhost:5432/" in named.url, "its certificate has the name"
    assert "//127.0.0.1:3306/" in jdbc_urls.of_mysql(HERE._replace(address="127.0.0.1", port=3306), None).url


@pytest.mark.parametrize("host", ["/run/postgresql", "@abstract"])
def test_a_socket_is_refused_in_a_jdbc_url(host: str) -> None:
    with pytest.raises(InvalidRequest, match="--database shop: Spark reads by TCP: write the server's host and port"):
        jdbc_urls.of_postgresql({"host": host}, DB._replace(host=host), "--database shop")


def test_parameters_of_libpq_are_passed_on() -> None:
    given = {
        "options": "-csearch_path=t_a -c role=reader", "application_name": "audit", "channel_binding": "require",
        "require_auth": "scram-sha-256", "sslnegotiation": "direct", "sslmode": "require", "gssencmode": "disable",
    }  # fmt: skip
    assert properties(given) == {
        "options": "-csearch_path=t_a -c role=reader", "ApplicationName": "audit", "channelBinding": "require",
        "requireAuth": "scram-sha-256", "sslNegotiation": "direct", "sslmode": "require", "gssEncMode": "disable",
    }  # fmt: skip
    assert properties({"fallback_application_name": "a", "application_name": "b"}) == {"ApplicationName": "b"}
    assert properties(dict.fromkeys(jdbc_urls.HARMLESS, "1")) == {}


@pytest.mark.parametrize("option", [*jdbc_urls.REFUSED, *jdbc_urls.SERVED_VALUES, "a_keyword_of_tomorrow"])
def test_options_that_java_lacks_are_refused_by_name(option: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        properties({option: "none"})
    assert str(refused.value).startswith(f"--database shop: {option}")
    assert re.search("leave (it|sslpassword) out|use a password", str(refused.value)), refused.value
    for served in jdbc_urls.SERVED_VALUES.get(option, ((), ""))[0]:
        properties({option: served})


@pytest.mark.parametrize("option", [*jdbc_urls.OF_OTHERS, "prepared_statement_cache_size"])
def test_options_of_other_drivers_are_refused_with_those_of_libpq(option: str) -> None:
    instead = jdbc_urls.OF_OTHERS.get(option, "leave it out")
    with pytest.raises(InvalidRequest) as refused:
        jdbc_urls.checked(f"postgresql://h/d?{option}=1", "--database shop")
    assert str(refused.value) == f"--database shop: {option}: libpq has no such option: {instead}"


def test_every_parameter_of_this_libpq_is_known() -> None:
    from psycopg import pq

    known = {*jdbc_urls.TRANSLATED, *jdbc_urls.RESOLVED, *jdbc_urls.HARMLESS, *jdbc_urls.REFUSED}
    named = {each.keyword.decode() for each in pq.Conninfo.get_defaults()}
    assert named - known - jdbc_urls.SERVED_VALUES.keys() == {"password"}


def test_every_parameter_is_documented() -> None:
    of_libpq = {*jdbc_urls.TRANSLATED, *jdbc_urls.RESOLVED, *jdbc_urls.REFUSED, *jdbc_urls.SERVED_VALUES}
    of_mysql = {*jdbc_urls.MYSQL_RESOLVED, *jdbc_urls.MYSQL_REFUSED}
    all_options = of_libpq | of_mysql | jdbc_urls.HARMLESS | jdbc_urls.MYSQL_HARMLESS | jdbc_urls.SQLITE_OPTIONS
    patterns = [re.escape(name).replace(r"\*", r"\w*") for name in re.findall(r"`([a-z_*]+)`", DOCUMENT)]
    assert not {name for name in all_options if not any(re.fullmatch(each, name) for each in patterns)}


def test_authorities_are_those_of_libpq(home: Path) -> None:
    assert properties({"sslmode": "verify-full", "sslrootcert": __file__}) == {
        "sslmode": "verify-full", "sslrootcert": __file__,
    }  # fmt: skip
    # With a file, `require` checks as verify-ca does; pgjdbc would not.
    assert properties({"sslmode": "require", "sslrootcert": __file__})["sslmode"] == "verify-ca"
    assert properties({"sslmode": "require", "sslrootcert": "/nowhere"}) == {"sslmode": "require"}
    (home / ".postgresql" / "root.crt").touch()
    default = str(home / ".postgresql" / "root.crt")
    assert properties({"sslmode": "require"}) == {"sslmode": "verify-ca", "sslrootcert": default}
    assert properties({"sslmode": "disable"}) == {"sslmode": "disable"}
    with pytest.raises(InvalidRequest, match="sslrootcert=system: Java trusts a list of its own: write the file"):
        properties({"sslmode": "verify-full", "sslrootcert": "system"})


def test_an_address_beside_a_name_is_used_unless_the_name_is_checked() -> None:
    both = {"host": "db.example", "hostaddr": "192.0.2.1"}
    assert "//192.0.2.1:5432/" in jdbc_urls.of_postgresql(both, DB, "").url
    with pytest.raises(InvalidRequest, match="hostaddr: the JDBC driver checks the name that it connects to: write"):
        properties(both | {"sslmode": "verify-full"})


KEYS: dict[str, Any] = {
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "EC": lambda: ec.generate_private_key(ec.SECP256R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}


def written(path: Path, key: Any, form: str, kind: str, password: bytes = b"") -> Path:
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(getattr(serialization.Encoding, form), getattr(serialization.PrivateFormat, kind), secret)
    )
    return path


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_client_certificate_is_passed_on_with_the_kind_of_its_key(algorithm: str, tmp_path: Path) -> None:
    key = written(tmp_path / "client.key", KEYS[algorithm](), "PEM", "PKCS8")
    both = {"sslcert": __file__, "sslkey": str(key)}
    assert properties(both) == both | {"pemKeyAlgorithm": algorithm}
    written(key, KEYS[algorithm](), "DER", "PKCS8")
    assert properties(both) == both
    with pytest.raises(InvalidRequest, match="sslcert: the JDBC driver reads a file with nothing but certificates"):
        properties({"sslcert": str(Authority(tmp_path, "us").issue("client")), "sslkey": str(key)})


@pytest.mark.parametrize("password", [b"", b"secret"])
def test_a_key_that_java_cannot_read_is_refused_with_the_command_that_writes_one(
    password: bytes, tmp_path: Path
) -> None:
    key = written(tmp_path / "old.key", KEYS["RSA"](), "PEM", "PKCS8" if password else "TraditionalOpenSSL", password)
    with pytest.raises(InvalidRequest, match=f"openssl pkcs8 -topk8 -nocrypt -in {key} -out NEW"):
        properties({"sslcert": __file__, "sslkey": str(key)})
    with pytest.raises(InvalidRequest, match="sslkey: the JDBC driver reads a key"):
        properties({"sslcert": __file__, "sslkey": "pkcs11:token=a"})


def test_the_certificate_in_the_home_directory_is_presented_as_libpq_does(home: Path) -> None:
    folder = home / ".postgresql"
    (folder / "postgresql.crt").touch()
    assert properties({}) == {}, "libpq presents none without its key"
    written(folder / "postgresql.key", KEYS["EC"](), "PEM", "PKCS8")
    assert properties({}) == {
        "sslcert": str(folder / "postgresql.crt"), "sslkey": str(folder / "postgresql.key"), "pemKeyAlgorithm": "EC",
    }  # fmt: skip
    assert properties({"sslmode": "disable"}) == {"sslmode": "disable"}


# --- MySQL and MariaDB ------------------------------------------------------------------------------------------


def test_mysql_is_reached_where_and_as_pymysql_did() -> None:
    address = jdbc_urls.of_mysql(DB._replace(port=3306), None, "ANSI,IGNORE_SPACE")
    assert address.url == "jdbc:mysql://db.example:3306/?permitMysqlScheme&allowPublicKeyRetrieval=true"
    assert address.properties == {"user": "auditor", "password": "s3cret", "database": "shop", "sslMode": "disable"}
    assert address.first == "SET SESSION sql_mode = 'ANSI,IGNORE_SPACE'"
    assert "//[2001:db8:0:0:0:0:0:7]:3306/" in jdbc_urls.of_mysql(DB._replace(host="2001:db8::7", port=3306), None).url


def tls_of(query: str) -> dict[str, str]:
    """The properties of MariaDB's driver for the context that PyMySQL itself makes of a URL."""
    engine = sa.create_engine(f"mysql+pymysql://h/d?{query}")
    _, options = engine.dialect.create_connect_args(engine.url)
    found = dict(jdbc_urls.of_mysql(DB, MySqlConnection(**options, defer_connect=True).ctx).properties)
    return {name: value for name, value in found.items() if name not in ("user", "password", "database")}


def test_the_certificate_is_checked_as_pymysql_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")  # tests/conftest.py leaves out what the system trusts
    file = Authority(tmp_path, "us").file
    own = file.read_text()
    assert tls_of("") == {"sslMode": "trust"}
    assert tls_of(f"ssl_ca={file}") == {"sslMode": "verify-full", "serverSslCert": own}
    assert tls_of(f"ssl_ca={file}&ssl_check_hostname=false") == {"sslMode": "verify-ca", "serverSslCert": own}
    # PyMySQL drops `ssl_ca` then, and goes by what the system trusts, without a look at the name.
    everyone = tls_of(f"ssl_ca={file}&ssl_verify_identity=true")
    assert everyone["sslMode"] == "verify-ca" and own not in everyone["serverSslCert"]
    assert everyone["serverSslCert"].count("BEGIN CERTIFICATE") == len(ssl.create_default_context().get_ca_certs())


@pytest.mark.parametrize("option", [*jdbc_urls.MYSQL_REFUSED, "an_option_of_tomorrow"])
def test_mysql_options_that_java_lacks_are_refused_by_name(option: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^--database shop: {option}: .*(leave it out|write|without)"):
        jdbc_urls.checked(f"mysql://h/d?{option}=1", "--database shop")


def test_harmless_mysql_options_are_kept() -> None:
    query = "&".join(f"{name}=1" for name in sorted(jdbc_urls.MYSQL_HARMLESS | jdbc_urls.MYSQL_RESOLVED))
    assert jdbc_urls.checked(f"mysql+pymysql://h/d?{query}", "") == f"mysql+pymysql://h/d?{query}"


# --- all --------------------------------------------------------------------------------------------------------


def test_psycopg2_has_the_parameters_of_psycopg() -> None:
    url = "postgresql+psycopg2://a:b@h/d?sslmode=require"
    assert jdbc_urls.checked(url, "") == "postgresql+psycopg://a:b@h/d?sslmode=require"
    several = jdbc_urls.checked("postgresql://u@/d?host=a:1&host=b:2", "")
    assert sa.make_url(several).query["host"] == ("a:1", "b:2")


def test_another_driver_is_refused_with_what_to_write() -> None:
    engine = sa.create_engine("mysql+pymysql://h/d")
    jdbc_urls.check_driver(engine, "--database shop")
    engine.url = engine.url.set(drivername="mysql+mysqldb")
    with pytest.raises(InvalidRequest, match="the options of mysqldb: write mysql://…, which is read by pymysql"):
        jdbc_urls.check_driver(engine, "--database shop")


def test_options_of_an_asyncio_driver_are_not_judged() -> None:
    """It is the driver that cannot be used (`make_engine`)."""
    for url in ("postgresql+asyncpg://h/d?ssl=require", "mysql+asyncmy://h/d?ssl=1", "sqlite+aiosqlite://"):
        assert jdbc_urls.checked(url, "") == url


def test_a_file_of_sqlite_has_this_jdbc_url() -> None:
    def url(text: str) -> str:
        return jdbc_urls._of_sqlite(sa.create_engine(jdbc_urls.checked(text, "--database shop"))).url

    assert url("sqlite:////data/shop.db") == "jdbc:sqlite:file:/data/shop.db"
    assert url("sqlite:////data/a%3Fb c.db") == "jdbc:sqlite:file:/data/a%3Fb%20c.db"
    assert url("sqlite:///file:/data/shop.db?mode=ro&uri=true") == "jdbc:sqlite:file:/data/shop.db?mode=ro"
    for memory in (
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?uri=true",
        "sqlite:///file:a?mode=memory&uri=true",
    ):
        with pytest.raises(InvalidRequest, match="Spark cannot read this process's memory"):
            jdbc_urls.checked(memory, "--database shop")
    with (
        warnings.catch_warnings(),
        pytest.raises(InvalidRequest, match=r"write sqlite:///file:shop\.db\?mode=ro&uri=true"),
    ):
        jdbc_urls.checked("sqlite:///shop.db?mode=ro", "--database shop")
