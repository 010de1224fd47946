"""Reading the binlog of MySQL or MariaDB: from packets to batches of committed transactions.

The frame is mysql-replication's: its connection, registration, checksum and GTID handshake. What it sends back is read
here, since its reader hides reconnects (and repeats transactions then), drops compressed rows silently, and decodes
every column of every table. See docs/adr/0009 for the measurements.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pymysql
from pymysqlreplication import BinLogStreamReader
from sqlalchemy.engine.url import URL

from notify.binlog_bridge import decoder
from notify.binlog_bridge.decoder import TableMap, Unreadable
from notify.binlog_bridge.position import GtidSet, MariaDbSet, MySqlSet, Position
from notify.errors import StorageFailed, Unavailable
from notify.outbox import LOCAL, SERVER
from notify.wire import BridgedTransaction, PackedMessage

OURS = (LOCAL.table.name, SERVER.table.name)
BATCH_TRANSACTIONS = 2000
BATCH_BYTES = 2 << 20
PART_BYTES = 4 << 20
"""A transaction whose rows are larger goes in parts, each a request, that become visible with the last."""
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0
"""Without even a heartbeat for so long, the connection is taken for dead."""
RECEIVE_BYTES = 1 << 18

_QUERY, _ROTATE, _FORMAT, _XID, _TABLE_MAP = 2, 4, 15, 16, 19
_INSERTS, _UPDATES = (23, 30), (24, 31)
_HEARTBEAT, _XA_PREPARE, _PARTIAL_UPDATE, _PAYLOAD = 27, 38, 39, 40
_MYSQL_GTID, _ANONYMOUS_GTID = 33, 34
_MARIADB_GTID, _COMPRESSED = 162, range(165, 172)
_STANDALONE, _PREPARED_XA = 1, 64
_COLUMNS = (
    "transaction_id",
    "message_no",
    "producer_group",
    "topic",
    "key",
    "tag",
    "headers",
    "body",
    "delay",
    "deliver_at",
    "ttl",
    "relayed",
    "state",
    "created_at",
)


class Purged(StorageFailed):
    """The source no longer has, or never had, what follows the position: nothing may be skipped silently."""

    code = "purged_position"


class SameServerId(Unavailable):
    """Somebody reads with this bridge's server id: for a moment that may be its own last connection."""

    code = "same_server_id"


@dataclass(slots=True)
class Batch:
    """Transactions in commit order, and where the source stands behind them."""

    transactions: list[BridgedTransaction] = field(default_factory=list)
    position: Position | None = None
    """None with `prepare`: the position stays where it was."""
    prepare: bool = False
    commit: list[str] = field(default_factory=list)
    source_transactions: int = 0
    rows: int = 0
    newest_us: int = 0
    """When the newest row was written, by the source's clock."""


class _Frame(BinLogStreamReader):  # type: ignore[misc]
    """mysql-replication's connection, without its reading."""

    def open(self) -> socket.socket:
        """Connect, register, ask for the binlog; the socket that it comes from."""
        self._BinLogStreamReader__connect_to_stream()
        found: socket.socket = self._stream_connection._sock
        return found


class _Table:
    """How rows of one table map are read."""

    def __init__(self, table: TableMap) -> None:
        self.is_server = table.table == SERVER.table.name
        self.count = len(table.columns)
        self.bitmap = (self.count + 7) // 8
        wanted = (*_COLUMNS, "decided_at") if self.is_server else _COLUMNS
        self.read = decoder.row_reader(table, wanted)
        self.state_before = decoder.row_reader(table, ("state",))
        self.all_present = ((1 << self.count) - 1).to_bytes(self.bitmap, "little")
        self.deliver_fraction = decoder.column(table, "deliver_at").fraction
        self.time_fraction = decoder.column(table, "decided_at" if self.is_server else "created_at").fraction
        self.name = f"{table.schema}.{table.table}"


class BinlogReader:
    """One connection to a source's binlog, from a position on. `batches` reads until the connection ends."""

    def __init__(self, url: URL, server_id: int, position: Position | None, *, mariadb: bool) -> None:
        """`position` None: from the first binlog there is, which must be the first there ever was."""
        self._schema = url.database or ""
        self._mariadb = mariadb
        self._position = position
        self._gtids: GtidSet = (MariaDbSet if mariadb else MySqlSet).parse(position.gtids if position else "")
        self._file = position.file if position else ""
        self._offset = position.offset if position else 0
        self._tables: dict[int, _Table | None] = {}
        self._made: dict[bytes, _Table] = {}
        self._checksum = 0
        self.last_event = time.monotonic()
        """When the source was last heard of."""
        self.caught_up = False
        """Whether the source waits for something to happen: it says so by heartbeats."""
        settings = {
            "host": url.host or "127.0.0.1",
            "port": url.port or 3306,
            "user": url.username or "",
            "password": url.password or "",
            "connect_timeout": 5,
            "read_timeout": SILENT_SECONDS,
        }
        socket_path = url.query.get("unix_socket")
        if socket_path:
            settings["unix_socket"] = str(socket_path)
        self._frame = _Frame(
            connection_settings=settings,
            server_id=server_id,
            blocking=True,
            slave_heartbeat=HEARTBEAT_SECONDS,
            is_mariadb=mariadb,
            auto_position=position.gtids if position else ("" if mariadb else None),
            enable_logging=False,
        )
        if not mariadb and position is None:
            self._from_the_first_file(settings)

    def _from_the_first_file(self, settings: dict[str, Any]) -> None:
        with pymysql.connect(**settings) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@gtid_purged")
            purged = cursor.fetchone()[0]
            if purged:
                raise Purged(f"the source has purged {purged} already: start with --backfill")
            cursor.execute("SHOW BINARY LOGS")
            self._frame.log_file, self._frame.log_pos = cursor.fetchone()[0], 4
            self._frame._BinLogStreamReader__resume_stream = True

    def connect(self) -> None:
        """Raises Purged for a position that is gone or foreign, Unavailable where the source does not answer."""
        try:
            self._socket = self._frame.open()
        except (pymysql.err.OperationalError, OSError) as error:
            raise Unavailable(f"the source does not answer: {error}") from error
        self._socket.settimeout(SILENT_SECONDS)
        self._checksum = 4 if self._frame._BinLogStreamReader__use_checksum else 0
        self.last_event = time.monotonic()

    def close(self) -> None:
        """From any thread: whoever waits for packets is woken."""
        with contextlib.suppress(OSError, AttributeError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._frame.close()

    # --- packets ----------------------------------------------------------------------------------------------

    def packets(self) -> Iterator[bytes | None]:
        """Events as they come; None whenever everything received so far has been given out."""
        rest = b""
        long: list[bytes] = []
        receive = self._socket.recv
        while True:
            try:
                data = receive(RECEIVE_BYTES)
            except TimeoutError:
                raise Unavailable(f"the source has been silent for {SILENT_SECONDS:g} s: connecting anew") from None
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
            self.last_event = time.monotonic()
            yield None

    # --- events -----------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Batches of committed transactions, and empty ones (with the position only) when there was nothing of ours.

        Raises Unavailable where the connection ends, Purged and Unreadable where going on would leave something out.
        """
        batch = Batch()
        size = 0
        pending: list[BridgedTransaction] = []
        pending_bytes = newest_us = 0
        prepared: list[str] = []
        inside = standalone = xa = False
        gtid: Any = None
        for packet in self.packets():
            if packet is None:
                if batch.source_transactions and not inside:
                    yield self._finished(batch)
                    batch, size = Batch(), 0
                continue
            # One byte says that it is an event; then 19 bytes of header.
            kind = packet[5]
            end = len(packet) - self._checksum
            if kind in _INSERTS or kind in _UPDATES:
                found = self._tables.get(int.from_bytes(packet[20:26], "little"))
                if found is None:
                    continue
                self._verify(packet)
                if xa:
                    raise Unreadable(f"{found.name} was written in an XA transaction, which may still be rolled back")
                before = len(packet)
                newest_us = self._rows(found, kind, packet, end, pending) or newest_us
                pending_bytes += before
                if pending_bytes > PART_BYTES and len(pending) > 1:
                    if batch.transactions:
                        yield self._finished(batch)
                        batch, size = Batch(), 0
                    # The last one may go on in the next event.
                    part, pending = pending[:-1], pending[-1:]
                    prepared += [t.id for t in part]
                    yield Batch(part, None, True, rows=sum(len(t.messages) for t in part))
                    pending_bytes = len(packet) if len(pending) else 0
            elif kind == _XID:
                self._offset = int.from_bytes(packet[14:18], "little")
                self.caught_up = False
                self._passed(gtid)
                if pending or prepared:
                    batch.transactions += pending
                    batch.commit += prepared
                    batch.rows += sum([len(t.messages) for t in pending])
                    batch.newest_us = newest_us or batch.newest_us
                    size += pending_bytes
                    pending, prepared, pending_bytes = [], [], 0
                batch.source_transactions += 1
                inside = False
                if size > BATCH_BYTES or batch.source_transactions >= BATCH_TRANSACTIONS:
                    yield self._finished(batch)
                    batch, size = Batch(), 0
            elif kind == _TABLE_MAP:
                self._map(packet[20:end])
            elif kind == _MARIADB_GTID:
                number, domain, flags = struct.unpack_from("<QIB", packet, 20)
                gtid = (domain, int.from_bytes(packet[6:10], "little"), number)
                inside, standalone, xa = True, bool(flags & _STANDALONE), bool(flags & _PREPARED_XA)
                pending.clear()
                pending_bytes = 0
            elif kind == _MYSQL_GTID:
                gtid = (_uuid(packet[21:37]), struct.unpack_from("<q", packet, 37)[0])
                inside, standalone, xa = True, True, False
                pending.clear()
                pending_bytes = 0
            elif kind == _QUERY:
                text = self._query(packet, end)
                word = text[:32].upper()
                if word.startswith(b"BEGIN"):
                    standalone = False
                elif word.startswith((b"COMMIT", b"ROLLBACK")) and not word.startswith(b"ROLLBACK TO"):
                    if pending and word.startswith(b"COMMIT"):
                        raise Unreadable("a table of ours is not InnoDB: its rows are written outside of transactions")
                    standalone = True
                    pending.clear()
                elif not standalone:
                    self._check_statement(text)
                if standalone and inside:
                    self._offset = int.from_bytes(packet[14:18], "little")
                    self._passed(gtid)
                    batch.source_transactions += 1
                    inside = False
            elif kind == _ROTATE:
                self._offset = struct.unpack_from("<Q", packet, 20)[0]
                # The one that the source makes up at the beginning of a stream has no checksum in older versions.
                self._file = packet[28:end].split(b"\0")[0].decode("ascii", "replace")
                self._tables.clear()
            elif kind == _FORMAT:
                self._tables.clear()
            elif kind == _HEARTBEAT:
                self.caught_up = True
            elif kind in _COMPRESSED or kind == _PAYLOAD:
                raise Unreadable(
                    "the binlog is compressed: SET GLOBAL log_bin_compress = OFF (MySQL: "
                    "binlog_transaction_compression = OFF), and start this bridge with --backfill if rows of ours may "
                    "be among what is compressed"
                )
            elif kind == _ANONYMOUS_GTID:
                raise Unreadable("the source writes transactions without GTIDs: set gtid_mode = ON")
            elif kind == _PARTIAL_UPDATE:
                raise Unreadable("the source writes partial JSON updates: set binlog_row_value_options = ''")

    def _finished(self, batch: Batch) -> Batch:
        batch.position = Position(str(self._gtids), self._file, self._offset)
        return batch

    def _passed(self, gtid: Any) -> None:
        if gtid is not None:
            self._gtids.add(*gtid)

    def _verify(self, packet: bytes) -> None:
        if self._checksum and zlib.crc32(packet[1:-4]) != int.from_bytes(packet[-4:], "little"):
            raise Unavailable("an event of the binlog has a wrong checksum: connecting anew")

    def _map(self, body: bytes) -> None:
        number = int.from_bytes(body[:6], "little")
        key = body[6:]
        found = self._made.get(key)
        if found is None:
            schema, name = decoder.names_of(body)
            if schema != self._schema or name not in OURS:
                self._tables[number] = None
                return
            if len(self._made) > 64:
                self._made.clear()
            found = self._made[key] = _Table(decoder.table_map(body))
        self._tables[number] = found

    def _rows(self, table: _Table, kind: int, packet: bytes, end: int, pending: list[BridgedTransaction]) -> int:
        """Add an event's rows to the transactions they belong to; when the last was written (0: none of ours)."""
        at = 28
        if kind in (30, 31):
            at += int.from_bytes(packet[28:30], "little")
        count, at = decoder.length_encoded(packet, at)
        if count != table.count:
            raise Unreadable(f"a row event of {table.name} has {count} columns where its table map has {table.count}")
        update = kind in _UPDATES
        for _ in range(1 + update):
            if packet[at : at + table.bitmap] != table.all_present:
                raise Unreadable(
                    f"{table.name} is logged with minimal images: set binlog_row_image = FULL on the source"
                )
            at += table.bitmap
        newest: bytes | None = None
        last = pending[-1] if pending else None
        while at < end:
            was = None
            if update:
                was, at = table.state_before(packet, at)
            row = table.read(packet, at)
            at = row[-1]
            if table.is_server:
                if row[12] != b"COMMITTED" or was == b"COMMITTED":
                    continue
                written = row[14]
            else:
                if update or row[11] != b"\0\0":
                    continue
                written = row[13]
            name = row[0].decode("ascii")
            if last is None or last.id != name:
                last = BridgedTransaction(id=name, producer_group=row[2].decode("ascii"), messages=[])
                pending.append(last)
            last.messages.append(
                PackedMessage(
                    topic=row[3].decode("ascii"),
                    body=row[7] or b"",
                    key=row[4].decode() if row[4] is not None else None,
                    tag=row[5].decode() if row[5] is not None else None,
                    headers=msgspec.json.decode(row[6]) if row[6] else None,
                    delay=decoder.double(row[8]),
                    deliver_at=decoder.moment(row[9], table.deliver_fraction) if row[9] is not None else None,
                    ttl=decoder.double(row[10]),
                )
            )
            newest = written
        if newest is not None:
            at_moment = decoder.moment(newest, table.time_fraction)
            return int(at_moment.timestamp() * 1_000_000)
        return 0

    def _query(self, packet: bytes, end: int) -> bytes:
        names, variables = packet[28], int.from_bytes(packet[31:33], "little")
        start = 33 + variables + names + 1
        return packet[start:end]

    def _check_statement(self, text: bytes) -> None:
        """A statement within a transaction: one that wrote to a table of ours is a gap."""
        if b"half_message" in text and not text[:12].upper().startswith((b"SAVEPOINT", b"ROLLBACK TO")):
            raise Unreadable(
                f"a session wrote to a table of ours in STATEMENT format ({text[:80].decode('utf-8', 'replace')} …): "
                "set binlog_format = ROW, then start this bridge with --backfill"
            )


def refusal(packet: bytes) -> Exception:
    """The error that the source sends instead of an event."""
    if packet[0] == 0xFE:
        return Unavailable("the source ended the stream")
    code = int.from_bytes(packet[1:3], "little")
    text = packet[9:].decode("utf-8", "replace")
    if "server_uuid/server_id" in text:
        return SameServerId(f"another bridge or replica reads with this server id ({text})")
    if code == 1236:
        return Purged(
            f"the source does not have what follows this bridge's position ({text}). Nothing was skipped: start with "
            "--backfill, which takes what is missing from the table, and goes on from now"
        )
    return Unavailable(f"the source refuses: {text} ({code})")


def _uuid(raw: bytes) -> str:
    h = raw.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
