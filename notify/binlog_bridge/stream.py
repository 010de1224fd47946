"""One connection to a source's binlog: its events, as packets.

mysql-replication connects, registers, and agrees on checksums and GTIDs with the source. The events are read here,
because mysql-replication's reader hides reconnects (and then repeats transactions), silently drops compressed rows, and
decodes every column of every table. See docs/adr/0009 for the measurements.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pymysql
from pymysqlreplication import BinLogStreamReader
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.continuing import check_continues
from notify.binlog_bridge.history import Purged
from notify.binlog_bridge.position import Position
from notify.errors import Unavailable
from notify.storage.sql.engines import with_driver

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""After this time without even a heartbeat the connection is regarded as lost."""
RECEIVE_BYTES = 1 << 18


PASSING = (
    "memory allocation failed", "failed on fseek", "failed on setting", "read error", "shutdown in progress",
    "bogus data in log event", "truncated in the middle of event", "event crc check failed", "corrupted",
)  # fmt: skip
"""Parts of the texts with which a source ends a stream (error 1236) although it has the events that follow: it lacks
memory or disk, or a file is damaged. Every other text means that the position is gone."""


class Damaged(Unavailable):
    """An event is damaged, in the network or in the source's file."""

    code = "damaged_event"


class SameServerId(Unavailable):
    """Another connection reads with this bridge's server id; for a moment it may be the bridge's own last one."""

    code = "same_server_id"


class _Frame(BinLogStreamReader):  # type: ignore[misc]
    """mysql-replication's connection, without its reader."""

    def open(self) -> socket.socket:
        """Connect, register, and request the binlog; the socket that receives the binlog."""
        self._BinLogStreamReader__connect_to_stream()
        binlog_socket: socket.socket = self._stream_connection._sock
        return binlog_socket


class BinlogStream:
    """A connection that reads from a position on, until it ends."""

    def __init__(self, url: URL, server_id: int, position: Position | None, *, mariadb: bool) -> None:
        """`position` None: read from the first binlog, which must be the first that the source ever wrote."""
        settings = _tls(url) | {
            "host": url.host or "127.0.0.1",
            "port": url.port or 3306,
            "user": url.username or "",
            "password": url.password or "",
            "connect_timeout": 5,
            "read_timeout": SILENT_SECONDS,
            # Not the source's present setting: older files keep the setting with which they were written.
            "init_command": "SET @master_binlog_checksum = 'CRC32', @source_binlog_checksum = 'CRC32'",
        }
        socket_path = url.query.get("unix_socket")
        if socket_path:
            settings["unix_socket"] = str(socket_path)
        self._position = position
        self._is_mariadb = mariadb
        self.logs_all = True
        """Whether the source writes all its changes to its binlog, including those that it replicates."""
        self._closing = threading.Lock()
        """Held while the connection is closed: pymysql fails if two threads close it at the same time."""
        self._frame = _Frame(
            connection_settings=settings,
            pymysql_wrapper=self._connected,
            server_id=server_id,
            blocking=True,
            slave_heartbeat=HEARTBEAT_SECONDS,
            is_mariadb=mariadb,
            auto_position=position.gtids if position else ("" if mariadb else None),
            enable_logging=False,
        )
        self._settings = settings

    def _connected(self, **settings: Any) -> Any:
        """The connection for the binlog. Raises Purged if the binlog lacks events that follow the position."""
        connection = pymysql.connect(**settings)
        try:
            if self._is_mariadb:
                self.logs_all = check_continues(connection, self._position)
        except BaseException:
            connection.close()
            raise
        return connection

    def _from_the_first_file(self) -> None:
        """Begin at the first file, by its name: without a name MySQL would begin at the end. Raises Purged."""
        with pymysql.connect(**self._settings) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@gtid_purged")
            purged = cursor.fetchone()[0]
            if purged:
                raise Purged(f"the source has purged {purged} already: start with --backfill")
            cursor.execute("SHOW BINARY LOGS")
            self._frame.log_file, self._frame.log_pos = cursor.fetchone()[0], 4
            self._frame._BinLogStreamReader__resume_stream = True

    def connect(self) -> None:
        """Raises Purged if the position is gone or foreign, Unavailable if the source does not answer."""
        try:
            if not (self._is_mariadb or (self._position and self._position.gtids)):
                self._from_the_first_file()
            self._socket = self._frame.open()
        except (pymysql.OperationalError, OSError) as error:
            raise Unavailable(f"the source does not answer: {error}") from error
        self._socket.settimeout(SILENT_SECONDS)

    def close(self) -> None:
        """Close the connection, from any thread; a thread that waits for packets is woken."""
        with contextlib.suppress(OSError, AttributeError):
            # Not the shutdown of a TLS socket, which would end the session while another thread reads from it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with self._closing, contextlib.suppress(pymysql.Error):
            self._frame.close()

    def packets(self) -> Iterator[bytes | None]:
        """Events in order; None after the last event received so far."""
        rest = b""
        long: list[bytes] = []
        receive = self._socket.recv
        while True:
            try:
                data = receive(RECEIVE_BYTES)
            except TimeoutError:
                raise Unavailable(f"the source has been silent for {SILENT_SECONDS:g} s: connecting again") from None
            except OSError as error:
                raise Unavailable(f"the connection to the source is lost: {error}") from error
            if not data:
                raise Unavailable("the source closed the connection")
            data = rest + data if rest else data
            at, end = 0, len(data)
            while end - at >= 4:
                size = data[at] | data[at + 1] << 8 | data[at + 2] << 16
                if end - at - 4 < size:
                    break
                at += 4
                packet = data[at : at + size]
                at += size
                if size == 0xFFFFFF:
                    long.append(packet)
                    continue
                if long:
                    packet = b"".join([*long, packet])
                    long.clear()
                if packet[0]:
                    raise refusal(packet)
                yield packet
            rest = data[at:] if at < end else b""
            yield None


def _tls(url: URL) -> dict[str, Any]:
    """The driver's TLS arguments, which SQLAlchemy derives from the URL as for the bridge's other connections."""
    _, arguments = with_driver(url).get_dialect()().create_connect_args(url)
    return {name: value for name, value in arguments.items() if name.startswith("ssl")}


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
    return Unavailable(f"the source refuses: {text} ({code})")
