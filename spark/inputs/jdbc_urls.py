"""A database's URL, and all else that its driver in Python went by, for the JDBC driver: passed on, or refused.

The audit asks a database by SQLAlchemy what to read, and Spark reads it by JDBC. Both have to reach the same server, as
the same user, and check it as strictly. So nothing is read from the URL's text that the first connection can say: libpq
names every parameter of a connection, also those of the environment and of service files, and PyMySQL has the context
of TLS that it made.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine.url import URL

from notify.errors import InvalidRequest
from notify.storage.sql.engines import parsed_url, with_driver

DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "org.mariadb.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlite": "org.sqlite.JDBC",
}
"""The JDBC drivers, by the kind of database."""
READ_BY = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql", "sqlite": "pysqlite"}
"""The drivers in Python whose parameters are known here."""
_TCP = "Spark reads by TCP: write the server's host and port into the URL"

# Parameters of libpq (https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS).
TRANSLATED = {
    "application_name": "ApplicationName",
    "fallback_application_name": "ApplicationName",
    "channel_binding": "channelBinding",
    "options": "options",
    "require_auth": "requireAuth",
    "sslmode": "sslmode",
    "sslnegotiation": "sslNegotiation",
}
"""Parameters of libpq that the JDBC driver takes with the same values, and their names there."""
RESOLVED = frozenset(
    {
        *("host", "hostaddr", "port", "dbname", "user", "passfile", "service", "servicefile"),
        *("target_session_attrs", "load_balance_hosts"),
        *("sslrootcert", "sslcert", "sslkey"),
    }
)
"""Parameters of libpq of which the JDBC driver gets the outcome: the server that was chosen, the user, the password,
and the files as `_tls_of_postgresql` passes them on."""
HARMLESS = frozenset(
    {
        "client_encoding",  # the JDBC driver always speaks UTF-8
        *("connect_timeout", "tcp_user_timeout"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
        *("min_protocol_version", "max_protocol_version"),
        *("sslcompression", "sslsni", "sslkeylogfile"),
        *("requirepeer", "authtype", "tty"),
    }
)
"""Parameters of libpq that change neither what is read nor who may read it. They are left out."""
_NO_TICKET = "Spark's workers have no ticket of Kerberos: use a password or a certificate, and leave it out"
_NO_REVOCATION = "the JDBC driver reads no list of revoked certificates: leave it out"
_NO_OTHER_LOGIN = "the JDBC driver knows no such login: use a password or a certificate, and leave it out"
REFUSED = {
    "gssdelegation": _NO_TICKET,
    "gsslib": _NO_TICKET,
    "krbsrvname": _NO_TICKET,
    "oauth_client_id": _NO_OTHER_LOGIN,
    "oauth_client_secret": _NO_OTHER_LOGIN,
    "oauth_issuer": _NO_OTHER_LOGIN,
    "oauth_scope": _NO_OTHER_LOGIN,
    "replication": "an audit reads tables: leave it out",
    "scram_client_key": _NO_OTHER_LOGIN,
    "scram_server_key": _NO_OTHER_LOGIN,
    "sslcrl": _NO_REVOCATION,
    "sslcrldir": _NO_REVOCATION,
    "sslpassword": "the JDBC driver reads a key without a password: write one with "
    "`openssl pkcs8 -topk8 -nocrypt -in KEY -out NEW`, name it as sslkey=NEW, and leave sslpassword out",
}
"""Parameters of libpq that the JDBC driver cannot keep, and what to do instead."""
SERVED_VALUES = {
    "gssencmode": (("disable", "prefer"), _NO_TICKET),
    "sslcertmode": (("allow",), "the JDBC driver presents a certificate where the server asks for one: leave it out"),
    "ssl_min_protocol_version": (
        ("TLSv1", "TLSv1.1", "TLSv1.2"), "the JDBC driver takes TLS 1.2 and 1.3: let the server demand it, and leave "
        "it out",
    ),
    "ssl_max_protocol_version": (("TLSv1.3",), "the JDBC driver takes TLS 1.2 and 1.3: leave it out"),
}  # fmt: skip
"""Parameters of libpq of which the JDBC driver keeps some values, and what to do instead of the others."""

OF_OTHERS = {
    "currentSchema": "write options=-csearch_path=SCHEMA, or name it with --schema",
    "schema": "write options=-csearch_path=SCHEMA, or name it with --schema",
    "search_path": "write options=-csearch_path=SCHEMA, or name it with --schema",
    "server_settings": "write options=-cNAME=VALUE",
    "ssl": "write sslmode=require, or sslmode=verify-full&sslrootcert=FILE",
    "ssl_context": "write sslmode=require, or sslmode=verify-full&sslrootcert=FILE",
    "timeout": "write connect_timeout=SECONDS",
    "unix_sock": f"{_TCP}, without it",
}
"""Parameters of other drivers of PostgreSQL, such as asyncpg, and what is written for them."""

# Parameters of PyMySQL and of SQLAlchemy for it.
MYSQL_RESOLVED = frozenset(
    {
        *("host", "port", "user", "password", "database", "db", "passwd"),
        *("ssl_ca", "ssl_capath", "ssl_check_hostname", "ssl_disabled", "ssl_verify_cert", "ssl_verify_identity"),
        "sql_mode",
    }
)
"""Parameters of which the JDBC driver gets the outcome: server, user, and how the certificate was checked."""
MYSQL_HARMLESS = frozenset(
    {
        *("charset", "collation", "use_unicode"),  # the JDBC driver always speaks UTF-8
        *("connect_timeout", "read_timeout", "write_timeout", "max_allowed_packet"),
        *("autocommit", "binary_prefix", "client_flag", "local_infile", "program_name"),
    }
)
_NO_CERTIFICATE = "Spark presents no certificate to MySQL and MariaDB: audit as a user who needs none, without it"
_NO_FILE = (
    "the JDBC driver reads no such file: write its host, port, user and password into the URL, and its ssl-ca as "
    "ssl_ca="
)
MYSQL_REFUSED = {
    "bind_address": "Spark's workers connect from addresses of their own: leave it out",
    "init_command": "an audit sets up its sessions itself: set it for the user, or at the server, and leave it out",
    "read_default_file": _NO_FILE,
    "read_default_group": _NO_FILE,
    "server_public_key": "connect with TLS, which needs no such key, and leave it out",
    "ssl": "write ssl_ca=FILE; without it TLS is used, unchecked, wherever the server offers it",
    "ssl_cert": _NO_CERTIFICATE,
    "ssl_cipher": "Java names ciphers differently: let the server demand them, and leave it out",
    "ssl_key": _NO_CERTIFICATE,
    "ssl_key_password": _NO_CERTIFICATE,
    "ssl_mode": "PyMySQL has no such option: write ssl_ca=FILE, which checks the server's certificate and name",
    "unix_socket": f"{_TCP}, without it",
}
"""Parameters that the JDBC driver cannot keep, and what to do instead."""

SQLITE_OPTIONS = frozenset(
    {"uri", "timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements"}
)
"""Parameters of sqlite3. All others belong to the URI of a file, and are passed on with it."""


class Reached(NamedTuple):
    """The server that a connection reached, by name and address, and the user that it reached it as."""

    host: str
    address: str
    port: int
    database: str
    user: str
    password: str


@dataclass(frozen=True)
class Address:
    """All that Spark needs to connect. `first`: the first statement of each session."""

    url: str
    properties: Mapping[str, str] = field(default_factory=dict)
    first: str = ""


def checked(text: str, named: str) -> str:
    """A database's URL with the driver that the audit asks it with.

    Raises InvalidRequest, with what to write instead, for a part that the JDBC driver cannot keep. `named`: the flag
    that has the URL, for errors.
    """
    try:
        url = with_driver(parsed_url(text))
    except sa.exc.ArgumentError:
        return text  # `open_engine` says what is wrong with it
    driver = url.drivername.partition("+")[2]  # another one is refused once the engine is made, whatever its options
    if driver == "pymysql":
        for option in url.query:
            if option in MYSQL_REFUSED:
                raise InvalidRequest(f"{named}: {option}: {MYSQL_REFUSED[option]}")
            if option not in MYSQL_RESOLVED | MYSQL_HARMLESS:
                raise InvalidRequest(f"{named}: {option}: the audit does not know this option: leave it out")
    if driver in ("psycopg", "psycopg2"):
        known = {*TRANSLATED, *RESOLVED, *HARMLESS, *REFUSED, *SERVED_VALUES, "password"}
        for option in url.query.keys() - known:
            raise InvalidRequest(
                f"{named}: {option}: libpq has no such option: {OF_OTHERS.get(option, 'leave it out')}"
            )
        if any(host.startswith(("/", "@")) for host in _hosts(url)):
            raise InvalidRequest(f"{named}: {_TCP}, without host=…")
        if driver == "psycopg2":  # of the same libpq, with the same parameters
            url = url.set(drivername="postgresql+psycopg")
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        _check_sqlite(url, named)
    return url.render_as_string(hide_password=False)


def check_driver(engine: sa.Engine, named: str) -> None:
    """Raises InvalidRequest for a database, or a driver, that the audit cannot read."""
    kind = engine.url.get_backend_name()
    if kind not in DRIVERS:
        raise InvalidRequest(
            f"{named}: the audit cannot read {kind}; it reads PostgreSQL, MySQL, MariaDB and SQLite"
        )  # fmt: skip
    if engine.url.get_driver_name() != READ_BY[kind]:
        raise InvalidRequest(
            f"{named}: the audit does not know the options of {engine.url.get_driver_name()}: write {kind}://…, which "
            f"is read by {READ_BY[kind]}"
        )


def address_of(connection: sa.Connection, named: str) -> Address:
    """How Spark reaches what a connection reached, with all that the connection went by.

    Raises InvalidRequest, with what to write instead, for what the JDBC driver cannot keep, such as a socket.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "postgresql":
        info = driver.info
        reached = Reached(info.host, info.hostaddr, info.port, info.dbname, info.user, info.password)
        return of_postgresql(info.get_parameters(), reached, named)
    if connection.dialect.name == "sqlite":
        return _of_sqlite(connection.engine)
    if driver.unix_socket:
        raise InvalidRequest(f"{named}: {_TCP}")
    url = connection.engine.url
    peer = driver._sock.getpeername()[0]
    password = url.query.get("password") or url.query.get("passwd") or url.password or ""
    reached = Reached(driver.host, peer, driver.port, _text(driver.db), _text(driver.user), str(password))
    row = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Ssl_cipher'").first()
    context = driver.ctx if row is not None and row[1] else None
    return of_mysql(reached, context, str(url.query.get("sql_mode", "")))


def _text(name: str | bytes | None) -> str:
    """A name of a connection of PyMySQL, which has encoded it."""
    return name.decode() if isinstance(name, bytes) else name or ""


def keep_to_one(engine: sa.Engine, connection: sa.Connection) -> None:
    """Have all later connections of an engine reach the server of this one, if its URL or environment names several:
    two copies of a database differ by what one of them lacks yet."""
    if connection.dialect.name != "postgresql":
        return
    info = connection.connection.driver_connection.info  # type: ignore[union-attr]
    given = info.get_parameters()
    if "," not in given.get("host", "") + given.get("hostaddr", ""):
        return
    kept = {"host": info.host, "port": info.port} | ({"hostaddr": info.hostaddr} if "hostaddr" in given else {})

    def connect(dialect: Any, _: Any, arguments: Any, options: dict[str, Any]) -> None:
        options.update(kept)

    event.listen(engine, "do_connect", connect, insert=True)


# --- PostgreSQL -------------------------------------------------------------------------------------------------


def of_postgresql(given: Mapping[str, str], reached: Reached, named: str) -> Address:
    """The address of what libpq reached. `given`: its parameters that are not the default."""
    for name, value in given.items():
        if name in REFUSED:
            raise InvalidRequest(f"{named}: {name}: {REFUSED[name]}")
        if name in SERVED_VALUES:
            served, instead = SERVED_VALUES[name]
            if value not in served:
                raise InvalidRequest(f"{named}: {name}={value}: {instead}")
        elif name not in TRANSLATED and name not in RESOLVED and name not in HARMLESS:
            raise InvalidRequest(f"{named}: {name}: the audit does not know this option: leave it out")
    if reached.host.startswith(("/", "@")):
        raise InvalidRequest(f"{named}: {_TCP}")
    properties = {new: given[name] for name, new in reversed(TRANSLATED.items()) if given.get(name)}
    if given.get("gssencmode") == "disable":
        properties["gssEncMode"] = "disable"
    properties |= _tls_of_postgresql(given, named)
    host = reached.host
    names_are_checked = properties.get("sslmode") == "verify-full"
    if "hostaddr" in given:
        if names_are_checked and reached.host != reached.address:
            raise InvalidRequest(
                f"{named}: hostaddr: the JDBC driver checks the name that it connects to: write host={reached.host} "
                "alone, or sslmode=verify-ca"
            )
        host = reached.address
    host = _host(host, reached.address, named, is_checked=names_are_checked)
    # A negative threshold makes the transfer binary from the first row on; otherwise ids would come as hexadecimal
    # text.
    url = f"jdbc:postgresql://{host}:{reached.port}/{quote(reached.database, safe='')}?prepareThreshold=-1"
    return Address(url, _login(reached) | properties)


def _tls_of_postgresql(given: Mapping[str, str], named: str) -> dict[str, str]:
    """The files by which the server is checked, and the client's certificate, where libpq finds them."""
    # A home that is not there, or not this user's, has no files, as for libpq.
    mode, home = given.get("sslmode", "prefer"), Path(os.path.expanduser("~/.postgresql"))
    if mode == "disable":
        return {}
    properties: dict[str, str] = {}
    authorities = given.get("sslrootcert", "")
    if authorities == "system":
        raise InvalidRequest(
            f"{named}: sslrootcert=system: Java trusts a list of its own: write the file, such as "
            "sslrootcert=/etc/ssl/certs/ca-certificates.crt"
        )
    file = Path(authorities).absolute() if authorities else home / "root.crt"
    if os.path.exists(file):
        properties["sslrootcert"] = str(file)
        if mode == "require":
            # libpq checks the certificate in this mode, too, once there is a file of authorities.
            properties["sslmode"] = "verify-ca"
    certificate, key = given.get("sslcert", ""), given.get("sslkey", "")
    if certificate or key:
        properties |= _certificate(Path(certificate or home / "postgresql.crt"), Path(key or home / "postgresql.key"))
        if not properties.get("sslcert"):
            raise InvalidRequest(
                f"{named}: sslcert: the JDBC driver reads a file with nothing but certificates: write one without the "
                "key that is in it"
            )
        if not properties.get("sslkey"):
            raise InvalidRequest(
                f"{named}: sslkey: the JDBC driver reads a key of PKCS #8 without a password: write one with "
                f"`openssl pkcs8 -topk8 -nocrypt -in {key or home / 'postgresql.key'} -out NEW`, and sslkey=NEW"
            )
    elif os.path.exists(home / "postgresql.crt"):
        found = _certificate(home / "postgresql.crt", home / "postgresql.key")
        properties |= found if found.keys() >= {"sslcert", "sslkey"} else {}  # else a server that needs one says so
    return properties


_ALGORITHMS = {
    b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x01": "RSA",
    b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01": "EC",
    b"\x06\x03\x2b\x65\x70": "Ed25519",
}
"""Algorithms of keys by their object identifiers in PKCS #8, with Java's names."""


def _certificate(certificate: Path, key: Path) -> dict[str, str]:
    """Properties for a client's certificate; without the files that the JDBC driver cannot read."""
    properties = {"sslcert": str(certificate.absolute())}
    try:
        if b"PRIVATE KEY-----" in certificate.read_bytes():
            return {}
        text = key.read_bytes()
    except OSError:
        return properties  # also a key of an engine, such as `pkcs11:…`
    if b"-----BEGIN PRIVATE KEY-----" in text:
        body = text.partition(b"-----BEGIN PRIVATE KEY-----")[2].partition(b"-----END")[0]
        try:
            encoded = ssl.PEM_cert_to_DER_cert(
                f"-----BEGIN CERTIFICATE-----\n{body.decode().strip()}\n-----END CERTIFICATE-----"
            )
        except ValueError:
            return properties
        algorithm = next((name for mark, name in _ALGORITHMS.items() if mark in encoded[:40]), "")
        return properties | ({"sslkey": str(key.absolute()), "pemKeyAlgorithm": algorithm} if algorithm else {})
    return properties if b"-----BEGIN" in text else properties | {"sslkey": str(key.absolute())}


def _hosts(url: URL) -> list[str]:
    """The further hosts that a URL names."""
    given = url.query.get("host", ())
    return [host for text in ([given] if isinstance(given, str) else given) for host in text.split(",")]


# --- MySQL and MariaDB ------------------------------------------------------------------------------------------


def of_mysql(reached: Reached, context: ssl.SSLContext | None, sql_mode: str = "") -> Address:
    """The address of what PyMySQL reached. `context`: that of its TLS; None: the connection is not encrypted.

    The URL is `jdbc:mysql:` (with MariaDB's driver): Spark has no dialect for `jdbc:mariadb:`, and would quote
    identifiers in a way that MariaDB reads as constants.
    """
    tls = {"sslMode": "disable"} if context is None else _tls_of_mysql(context)
    host = _host(reached.host, reached.address, "", is_checked=tls["sslMode"] == "verify-full")
    # MariaDB's driver refuses the scheme jdbc:mysql: without permitMysqlScheme. PyMySQL asks for the server's key, too,
    # where a password is sent without TLS.
    url = f"jdbc:mysql://{host}:{reached.port}/?permitMysqlScheme&allowPublicKeyRetrieval=true"
    # Not in the URL, where the driver takes every character as it is, and ends the name at a slash.
    database = {"database": reached.database} if reached.database else {}
    mode = "SET SESSION sql_mode = '{}'".format(sql_mode.replace("'", "''")) if sql_mode else ""
    return Address(url, _login(reached) | database | tls, mode)


def _tls_of_mysql(context: ssl.SSLContext) -> dict[str, str]:
    """The properties with which MariaDB's driver checks a certificate as PyMySQL's context does.

    It cannot try TLS and continue without it, so the caller must know that the server offers TLS. It gets the
    authorities themselves: those of a file, those of a folder that were used, or those of the system.
    """
    if context.verify_mode == ssl.CERT_NONE:
        return {"sslMode": "trust"}
    authorities = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))
    return {"sslMode": "verify-full" if context.check_hostname else "verify-ca", "serverSslCert": authorities}


# --- SQLite -----------------------------------------------------------------------------------------------------


def _check_sqlite(url: URL, named: str) -> None:
    others = sorted(set(url.query) - SQLITE_OPTIONS)
    is_uri = str(url.query.get("uri", "")).lower() in ("true", "1", "yes", "on", "y", "t")
    if others and not is_uri:
        raise InvalidRequest(
            f"{named}: {others[0]}: sqlite3 reads it only from a URI: write sqlite:///file:{url.database}?"
            f"{others[0]}={url.query[others[0]]}&uri=true, or leave it out"
        )
    if (url.database or ":memory:") == ":memory:" or ":memory:" in str(url.database) or (
        is_uri and url.query.get("mode") == "memory"
    ):  # fmt: skip
        raise InvalidRequest(f"{named}: Spark cannot read this process's memory: write the file, sqlite:///file")


def _of_sqlite(engine: sa.Engine) -> Address:
    (file,), options = engine.dialect.create_connect_args(engine.url)
    # As a URI whatever the path is: the JDBC driver takes what follows a question mark in a plain path for options.
    return Address(f"jdbc:sqlite:{file if options.get('uri') else 'file:' + quote(str(file))}")


# --- all --------------------------------------------------------------------------------------------------------


def _login(reached: Reached) -> dict[str, str]:
    return {"user": reached.user} | ({"password": reached.password} if reached.password else {})


def _host(host: str, address: str, named: str, *, is_checked: bool) -> str:
    """The host of a JDBC URL. `is_checked`: whether the server's certificate has to have its name.

    `localhost` is two addresses, which may have a server each, and Java tries them in another order than Python.
    """
    if not is_checked and _is_loopback(address):
        host = address
    if "%" in host:
        raise InvalidRequest(f"{named}: {host} is an address of this machine's network card: write the server's name")
    if ":" not in host:
        return host
    # Written out, as Java writes the addresses of a certificate: PostgreSQL's driver compares the texts.
    written = ":".join(f"{int(part, 16):x}" for part in ipaddress.IPv6Address(host).exploded.split(":"))
    return f"[{written}]"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
