"""One connection to a source's binlog: its events, as packets.

PyMySQL logs in. The binlog is requested here, since no package encodes tagged GTIDs, and read from the socket in large
chunks. See docs/adr/0047, and docs/adr/0009 for the measurements.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pymysql
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.binlog import events, rights
from notify.binlog_bridge.binlog.history import check_continues, check_executed, check_unnamed
from notify.binlog_bridge.binlog.position import MySqlSet, Position, shown
from notify.binlog_bridge.errors import Damaged, Purged, SameServerId, Unfit
from notify.errors import Unavailable
from notify.runtime.databases import KEEPALIVE, set_up_mysql
from notify.storage.sql.engines import encoded_password, with_driver

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""After this time without even a heartbeat the connection is regarded as lost."""
SEARCH_SECONDS = 300.0
"""The same before the first event that is not of a file's beginning. A source reads its file up to the position; a
MariaDB is silent meanwhile, and would begin again after each new connection. TCP notices a machine that is gone."""
RECEIVE_BYTES = 1 << 18
_DUMP, _DUMP_GTID = 0x12, 0x1E
"""The commands COM_BINLOG_DUMP and COM_BINLOG_DUMP_GTID."""
_THROUGH_GTID = 0x04
_BEGIN = 4
"""Where the first event of a binlog file begins, after the file's mark."""
_OF_A_FILE = frozenset(
    bytes((kind,))
    for kind in (
        events.ROTATE, events.FORMAT, events.PREVIOUS_GTIDS, events.GTID_LIST, events.CHECKPOINT,
        events.START_ENCRYPTION,
    )
)  # fmt: skip
"""The types of events that a source sends before it looks for the position."""
_FULL = 0xFFFFFF
"""The size of a packet after which the same event continues in another packet."""

PASSING = (
    "memory allocation failed", "failed on fseek", "failed on setting", "read error", "shutdown in progress",
    "bogus data in log event", "truncated in the middle of event", "event crc check failed", "corrupted",
    "i/o error reading log event",
)  # fmt: skip
"""Parts of the texts with which a source ends a stream (error 1236) although it has the events that follow: it lacks
memory or disk, or a file is damaged. Every other text means that the position is gone."""


_AGREED = (
    # Not the source's present setting: older files keep the checksums with which they were written.
    "SET @master_binlog_checksum = 'CRC32', @source_binlog_checksum = 'CRC32', "
    "@master_heartbeat_period = {0}, @source_heartbeat_period = {0}".format(round(HEARTBEAT_SECONDS * 1e9))
)
"""How both sides of a connection agree on checksums and heartbeats. MySQL knows the `source` names since 8.0.26."""
_MARIADB = (
    "SET @mariadb_slave_capability = 4, @slave_gtid_strict_mode = 1, @slave_gtid_ignore_duplicates = 0, "
    "@slave_connect_state = %s"
)
"""MariaDB takes the position from a variable, and sends GTID events to a reader of this capability only."""


class BinlogStream:
    """A connection that reads from a position on, until it ends."""

    def __init__(
        self,
        url: URL,
        server_id: int,
        position: Position | None,
        *,
        mariadb: bool,
        silent_seconds: float = SILENT_SECONDS,
        search_seconds: float = SEARCH_SECONDS,
    ) -> None:
        """`position` None: read from the first binlog, which must be the first that the source ever wrote.
        `silent_seconds`, `search_seconds`: see SILENT_SECONDS and SEARCH_SECONDS."""
        self._settings = _login(url) | {"connect_timeout": 5, "read_timeout": silent_seconds}
        self._silent_seconds, self._search_seconds = silent_seconds, search_seconds
        self._server_id = server_id
        self._position = position
        self._is_mariadb = mariadb
        self.logs_all = True
        """Whether the source writes all its changes to its binlog, including those that it replicates."""
        self.purged = ""
        """A MySQL's gtid_purged."""
        self._closing = threading.Lock()
        """Held while the connection is closed: pymysql fails if two threads close it at the same time."""
        self._connection: Any = None
        self._is_closed = False

    def connect(self) -> None:
        """Raises Purged if the position is gone or foreign, Unavailable if the source does not answer, Unfit if it
        refuses this user."""
        try:
            connection = pymysql.connect(**self._settings)
            try:
                set_up_mysql(connection, waits_long=True)
                command, request = self._requested(connection)
                with connection.cursor() as cursor:
                    cursor.execute(_AGREED)
                connection._execute_command(command, request)
                self._socket: socket.socket = connection._sock
                _keep_alive(self._socket)
            except BaseException:
                connection.close()
                raise
        except (pymysql.Error, OSError) as error:
            why = rights.denied(error)
            if why is not None:
                raise Unfit(f"the source refuses to be read: {why}") from error
            raise Unavailable(f"the source does not answer: {error}") from error
        self._connection = connection
        if self._is_closed:  # by another thread, which could not know the connection yet
            self.close()

    def _requested(self, connection: Any) -> tuple[int, bytes]:
        """The command that requests the binlog, and its body. Raises Purged if the position is gone or foreign."""
        gtids = self._position.gtids if self._position else ""
        if self._is_mariadb:
            self.logs_all = check_continues(connection, self._position)
            with connection.cursor() as cursor:
                cursor.execute(_MARIADB, (gtids,))
            return _DUMP, self._request(b"")
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@gtid_purged")
            self.purged = str(cursor.fetchone()[0] or "")
        if self._position is None or not gtids:
            if self.purged:
                raise Purged(f"the source has purged {shown(self.purged)} already: start with --backfill")
            return _DUMP, self._request(_first_file(connection))
        check_executed(connection, self._position)
        check_unnamed(connection, self._position)
        encoded = MySqlSet.parse(gtids).encode()
        head = struct.pack("<HIIQI", _THROUGH_GTID, self._server_id, 0, _BEGIN, len(encoded))
        return _DUMP_GTID, head + encoded

    def _request(self, file: bytes) -> bytes:
        """The body of COM_BINLOG_DUMP, from the beginning of a file on."""
        return struct.pack("<IHI", _BEGIN, 0, self._server_id) + file

    def close(self) -> None:
        """Close the connection, from any thread; a thread that waits for packets is woken."""
        with contextlib.suppress(OSError, AttributeError):
            # Not the shutdown of a TLS socket, which would end the session while another thread reads from it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._is_closed = True
        with self._closing, contextlib.suppress(pymysql.Error):
            if self._connection is not None:
                self._connection.close()

    def packets(self) -> Iterator[bytes | None]:
        """Events in order; None after the last event received so far."""
        rest = b""
        long: list[bytes] = []
        missing = 0
        self._socket.settimeout(self._search_seconds)
        is_searching = True
        while True:
            data = self._received(rest, missing)
            at, end, missing = 0, len(data), 0
            while end - at >= 4:
                size = data[at] | data[at + 1] << 8 | data[at + 2] << 16
                missing = size - (end - at - 4)
                if missing > 0:
                    break
                at += 4
                packet = data[at : at + size]
                at += size
                if size == _FULL:
                    long.append(packet)
                    continue
                if long:
                    packet = b"".join([*long, packet])
                    long.clear()
                if packet[0]:
                    raise refusal(packet)
                if is_searching and packet[5:6] not in _OF_A_FILE:
                    is_searching = False
                    self._socket.settimeout(self._silent_seconds)
                yield packet
            rest = data[at:] if at < end else b""
            yield None

    def _received(self, rest: bytes, missing: int) -> bytes:
        """`rest` and the next bytes of the source, at least `missing`. Raises Unavailable."""
        parts = [rest] if rest else []
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                silent = self._socket.gettimeout()
                raise Unavailable(f"the source has been silent for {silent:g} s: connecting again") from None
            except OSError as error:
                raise Unavailable(f"the connection to the source is lost: {error}") from error
            if not data:
                raise Unavailable("the source closed the connection")
            if not parts and len(data) >= missing:
                return data
            parts.append(data)
            missing -= len(data)
            if missing <= 0:
                return b"".join(parts)


def _keep_alive(connection: socket.socket) -> None:
    """Let TCP notice within half a minute that the source's machine is gone."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        for option, value in zip(options, KEEPALIVE.values(), strict=True):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _first_file(connection: Any) -> bytes:
    """The name of a MySQL's first file: without a name it would begin at the end."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW BINARY LOGS")
        return str(cursor.fetchone()[0]).encode()


_LOGIN = ("unix_socket", "read_default_file", "read_default_group", "init_command")


def _login(url: URL) -> dict[str, Any]:
    """The driver's arguments by which it reaches the source and logs in. SQLAlchemy derives those for TLS from the URL,
    as for the bridge's other connections. An option file has what the URL does not say, and the URL's
    `init_command` may take the role that has the rights."""
    _, arguments = with_driver(url).get_dialect()().create_connect_args(url)
    login = {name: value for name, value in arguments.items() if name in _LOGIN or name.startswith("ssl")}
    host = None if "read_default_file" in login else "127.0.0.1"
    password = url.password and encoded_password(url.password)
    own = {"host": url.host or host, "port": url.port, "user": url.username, "password": password}
    return login | {name: value for name, value in own.items() if value is not None}


def refusal(packet: bytes) -> Exception:
    """The error in a packet that the source sent instead of an event."""
    if packet[0] == 0xFE:
        return Unavailable("the source ended the stream")
    code = int.from_bytes(packet[1:3], "little")
    text = packet[9:].decode("utf-8", "replace")
    if "server_uuid/server_id" in text:
        return SameServerId(f"another bridge or replica reads with this server id ({text})")
    if code == 1236 and any(part in text.lower() for part in PASSING):
        return Damaged(f"the source cannot read its own binlog for now ({text})")
    if code == 1236:
        return Purged(
            f"the source does not have what follows this bridge's position ({text}). Nothing was skipped: start with "
            "--backfill, which sends the missing messages from the tables, and then continues"
        )
    why = rights.denied_by(code, text)
    if why is not None:
        return Unfit(f"the source refuses to be read: {why}")
    return Unavailable(f"the source refuses: {text} ({code})")
