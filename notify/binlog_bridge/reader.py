"""Reading the binlog of MySQL or MariaDB: from packets to batches of committed transactions."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator

from sqlalchemy.engine.url import URL

from notify.binlog_bridge.decoder import Unreadable
from notify.binlog_bridge.position import GtidSet, MariaDbSet, MySqlSet, Position
from notify.binlog_bridge.stream import BinlogStream
from notify.binlog_bridge.tables import UPDATES, Tables
from notify.errors import Unavailable
from notify.wire import BridgedTransaction, PackedBridgeBatch

BATCH_TRANSACTIONS = 2000
BATCH_BYTES = 2 << 20
PART_BYTES = 4 << 20
"""A transaction whose rows are larger goes in parts, each a request, that become visible with the last."""

_QUERY, _ROTATE, _FORMAT, _XID, _TABLE_MAP = 2, 4, 15, 16, 19
_ROWS = frozenset((23, 30, *UPDATES))
_HEARTBEAT, _PARTIAL_UPDATE, _PAYLOAD = 27, 39, 40
_MYSQL_GTID, _ANONYMOUS_GTID = 33, 34
_MARIADB_GTID, _COMPRESSED = 162, range(165, 172)
_STANDALONE, _PREPARED_XA = 1, 64
_COMPRESSION = (
    "the binlog is compressed: SET GLOBAL log_bin_compress = OFF (MySQL: binlog_transaction_compression = OFF), and "
    "start this bridge with --backfill if rows of ours may be among what is compressed"
)
_UNREADABLE = dict.fromkeys((*_COMPRESSED, _PAYLOAD), _COMPRESSION) | {
    _ANONYMOUS_GTID: "the source writes transactions without GTIDs: set gtid_mode = ON",
    _PARTIAL_UPDATE: "the source writes partial JSON updates: set binlog_row_value_options = ''",
}
"""Types of events that would leave something out, and what to do."""


Read = tuple[PackedBridgeBatch, int]
"""A batch, without its epoch and the position before it, which whoever posts it knows; and when its newest row was
written, in microseconds by the source's clock (0: it has none). A batch to `prepare` has no position: it stays."""


class BinlogReader:
    """One connection to a source's binlog, from a position on. `batches` reads until the connection ends."""

    def __init__(self, url: URL, server_id: int, position: Position | None, *, mariadb: bool) -> None:
        """`position` None: from the first binlog there is, which must be the first there ever was."""
        self._stream = BinlogStream(url, server_id, position, mariadb=mariadb)
        self._assembly = Assembly(url.database or "", position, mariadb=mariadb)

    @property
    def caught_up(self) -> bool:
        """Whether the source waits for something to happen: it says so by heartbeats."""
        return self._assembly.caught_up

    def connect(self) -> None:
        """Raises Purged for a position that is gone or foreign, Unavailable where the source does not answer."""
        self._stream.connect()

    def batches(self) -> Iterator[Read]:
        """See Assembly. Raises Unavailable where the connection ends, too."""
        return self._assembly.batches(self._stream.packets(), self._stream.checksum)

    def close(self) -> None:
        """End the connection, from any thread: whoever waits for packets is woken."""
        self._stream.close()


class Assembly:
    """Puts transactions together from events, and batches from transactions."""

    def __init__(self, schema: str, position: Position | None, *, mariadb: bool) -> None:
        """`schema`: the database whose tables are read; `position`: where the events begin."""
        self.caught_up = False
        """Whether the source waits for something to happen."""
        self._tables = Tables(schema)
        self._checksum = 0
        self._gtids: GtidSet = (MariaDbSet if mariadb else MySqlSet).parse(position.gtids if position else "")
        self._file = position.file if position else ""
        self._offset = position.offset if position else 0
        self._batch = _batch([])
        self._size = 0
        """Bytes of the batch's rows."""
        self._passed = 0
        """Transactions of the source in the batch, whether or not they are ours."""
        self._newest_us = 0
        """When the newest row of the batch was written."""
        self._gtid: tuple[int, int, int] | tuple[str, int] | None = None
        """The GTID of the source's transaction that is being read."""
        self._pending: list[BridgedTransaction] = []
        """Transactions of ours within it."""
        self._pending_bytes = 0
        self._prepared: list[str] = []
        """Those that went in parts already."""
        self._pending_us = 0
        """When the newest row of those was written."""
        self._is_inside = self._is_standalone = self._is_xa = False

    def batches(self, packets: Iterable[bytes | None], checksum: int = 0) -> Iterator[Read]:
        """Batches of committed transactions, and empty ones (with the position only) when there was nothing of ours.

        `packets`: events, and None whenever everything received so far has been given out; `checksum`: how many bytes
        at the end of each are its checksum. Raises Unavailable for a wrong one, Unreadable where going on would leave
        something out.
        """
        self._checksum = checksum
        for packet in packets:
            if packet is None:
                if self._passed and not self._is_inside:
                    yield self._finished()
                continue
            # One byte says that it is an event; then 19 bytes of header.
            kind = packet[5]
            if kind in _ROWS:
                yield from self._add_rows(kind, packet)
            elif kind == _XID:
                self._commit(packet)
                if self._size > BATCH_BYTES or self._passed >= BATCH_TRANSACTIONS:
                    yield self._finished()
            elif kind == _TABLE_MAP:
                self._tables.map(packet[20 : len(packet) - checksum])
            elif kind in (_MARIADB_GTID, _MYSQL_GTID):
                self._begin(kind, packet)
            elif kind == _QUERY:
                self._query(packet)
            elif kind == _ROTATE:
                self._offset = struct.unpack_from("<Q", packet, 20)[0]
                # The one that the source makes up at the beginning of a stream has no checksum in older versions.
                self._file = packet[28 : len(packet) - checksum].split(b"\0")[0].decode("ascii", "replace")
                self._tables.clear()
            elif kind == _FORMAT:
                self._tables.clear()
            elif kind == _HEARTBEAT:
                self.caught_up = True
            elif kind in _UNREADABLE:
                raise Unreadable(_UNREADABLE[kind])

    def _finished(self) -> Read:
        """The batch, with where the source stands behind it; another begins."""
        batch, newest_us = self._batch, self._newest_us
        batch.position = Position(str(self._gtids), self._file, self._offset).text
        self._batch, self._size, self._passed, self._newest_us = _batch([]), 0, 0, 0
        return batch, newest_us

    def _begin(self, kind: int, packet: bytes) -> None:
        """A transaction of the source begins."""
        if kind == _MARIADB_GTID:
            number, domain, flags = struct.unpack_from("<QIB", packet, 20)
            self._gtid = (domain, int.from_bytes(packet[6:10], "little"), number)
            self._is_standalone, self._is_xa = bool(flags & _STANDALONE), bool(flags & _PREPARED_XA)
        else:
            self._gtid = (_uuid(packet[21:37]), struct.unpack_from("<q", packet, 37)[0])
            self._is_standalone, self._is_xa = True, False
        self._is_inside = True
        self._pending.clear()
        self._pending_bytes = 0

    def _add_rows(self, kind: int, packet: bytes) -> list[Read]:
        """Rows of a table; batches where a transaction has become so large that a part of it goes now."""
        table = self._tables.of(packet)
        if table is None:
            return []
        self._verify(packet)
        if self._is_xa:
            raise Unreadable(f"{table.name} was written in an XA transaction, which may still be rolled back")
        written_us = table.add(kind, packet, len(packet) - self._checksum, self._pending)
        self._pending_us = written_us or self._pending_us
        self._pending_bytes += len(packet)
        if self._pending_bytes <= PART_BYTES or len(self._pending) <= 1:
            return []
        batches = [self._finished()] if self._batch.transactions else []
        # The last one may go on in the next event.
        part, self._pending = self._pending[:-1], self._pending[-1:]
        self._prepared += [t.id for t in part]
        self._pending_bytes = len(packet)
        return [*batches, (_batch(part, prepare=True), 0)]

    def _commit(self, packet: bytes) -> None:
        """The source's transaction is committed, and what it wrote belongs to the batch."""
        self._offset = int.from_bytes(packet[14:18], "little")
        self.caught_up = False
        if self._pending or self._prepared:
            batch = self._batch
            batch.transactions += self._pending
            batch.commit += self._prepared
            self._newest_us = self._pending_us or self._newest_us
            self._size += self._pending_bytes
            self._pending, self._prepared, self._pending_bytes, self._pending_us = [], [], 0, 0
        self._pass()

    def _query(self, packet: bytes) -> None:
        """A statement: it begins or ends a transaction, is one by itself, or stands within one."""
        names, variables = packet[28], int.from_bytes(packet[31:33], "little")
        text = packet[33 + variables + names + 1 : len(packet) - self._checksum]
        word = text[:32].upper()
        if word.startswith(b"BEGIN"):
            self._is_standalone = False
        elif word.startswith((b"COMMIT", b"ROLLBACK")) and not word.startswith(b"ROLLBACK TO"):
            if self._pending and word.startswith(b"COMMIT"):
                raise Unreadable("a table of ours is not InnoDB: its rows are written outside of transactions")
            self._is_standalone = True
            self._pending.clear()
        elif not self._is_standalone:
            _check_statement(text)
        if self._is_standalone and self._is_inside:
            self._offset = int.from_bytes(packet[14:18], "little")
            self._pass()

    def _pass(self) -> None:
        """The source's transaction lies behind: the position says so."""
        if self._gtid is not None:
            self._gtids.add(*self._gtid)
        self._passed += 1
        self._is_inside = False

    def _verify(self, packet: bytes) -> None:
        if self._checksum and zlib.crc32(packet[1:-4]) != int.from_bytes(packet[-4:], "little"):
            raise Unavailable("an event of the binlog has a wrong checksum: connecting anew")


def _check_statement(text: bytes) -> None:
    """A statement within a transaction: one that wrote to a table of ours is a gap."""
    if b"half_message" in text and not text[:12].upper().startswith((b"SAVEPOINT", b"ROLLBACK TO")):
        raise Unreadable(
            f"a session wrote to a table of ours in STATEMENT format ({text[:80].decode('utf-8', 'replace')} …): "
            "set binlog_format = ROW, then start this bridge with --backfill"
        )


def _batch(transactions: list[BridgedTransaction], *, prepare: bool = False) -> PackedBridgeBatch:
    return PackedBridgeBatch(epoch=0, expected_position="", position="", transactions=transactions, prepare=prepare)


def _uuid(raw: bytes) -> str:
    h = raw.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
