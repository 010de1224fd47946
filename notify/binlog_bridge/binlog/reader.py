"""Reading the binlog of MySQL or MariaDB: from packets to batches of committed transactions."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from sqlalchemy.engine.url import URL

from notify.binlog_bridge.batching import BATCH_BYTES, Batching
from notify.binlog_bridge.binlog import events
from notify.binlog_bridge.binlog.compressed import events_in, inflated, plain_rows
from notify.binlog_bridge.binlog.events import (
    COMPRESSED_ROWS,
    FORMAT,
    GTIDS,
    MARIADB_GTID,
    MYSQL_GTID,
    QUERY,
    ROTATE,
    ROWS,
    TABLE_MAP,
    XID,
)
from notify.binlog_bridge.binlog.history import History, check_gap, gtid_list
from notify.binlog_bridge.binlog.position import GtidSet, MariaDbSet, MySqlSet, Position, server_uuid, tagged_gtid
from notify.binlog_bridge.binlog.stream import BinlogStream
from notify.binlog_bridge.binlog.tables import Tables
from notify.binlog_bridge.errors import Damaged, Unreadable
from notify.binlog_bridge.log import Read
from notify.binlog_bridge.rows import MOST_TABLES
from notify.binlog_bridge.scope import Scope
from notify.client.tables.purge import IDS_RETENTION_SECONDS
from notify.runtime.clock import wall_clock

_STANDALONE = 1
_WITH_CRC32 = 1
_CHECKSUM_BYTES = 4
_OFFSET, _FLAGS, _BODY = 14, 18, 20
"""Where in a packet an event's place in its file, its flags and its body begin: after a byte that marks an event and
parts of a header of 19 bytes."""


class Quiet(NamedTuple):
    """A stream's silence: where the source waits for more events, by its newest heartbeat, and how many heartbeats came
    since the newest transaction began."""

    place: bytes = b""
    heartbeats: int = 0


_HEARD = Quiet()


class BinlogReader:
    """One connection to a source's binlog, from a position on. `batches` reads until the connection ends."""

    def __init__(
        self,
        url: URL,
        server_id: int,
        position: Position | None,
        *,
        mariadb: bool,
        source_us: Callable[[], int] = wall_clock,
        scope: Scope | None = None,
        known_seconds: float = IDS_RETENTION_SECONDS,
        most_bytes: Callable[[], int] = lambda: BATCH_BYTES,
    ) -> None:
        """`position` None: read from the first binlog, which must be the first that the source ever wrote.

        `source_us`: the time by the source's clock, in microseconds. `scope`: whose tables are read; None: those of the
        URL's database. `known_seconds`: see Assembly. `most_bytes`: see Batching.
        """
        self._stream = BinlogStream(url, server_id, position, mariadb=mariadb)
        self._assembly = Assembly(
            scope or url.database or "", position, mariadb=mariadb, source_us=source_us, known_seconds=known_seconds
        )
        self._assembly.most_bytes = most_bytes

    @property
    def caught_up_us(self) -> int:
        """When the source last reported by a heartbeat that it has no more events; 0 after the next transaction began.

        The time is by this machine's clock, in microseconds since 1970.
        """
        return self._assembly.caught_up_us

    @property
    def quiet(self) -> Quiet:
        return self._assembly.quiet

    def connect(self) -> None:
        """Raises Purged if the position is gone or foreign, Unavailable if the source does not answer."""
        self._stream.connect()
        self._assembly.joined(logs_all=self._stream.logs_all, purged=self._stream.purged)

    def batches(self) -> Iterator[Read]:
        """See Assembly. Also raises Unavailable when the connection ends."""
        return self._assembly.batches(self._stream.packets())

    def confirm(self, position: str) -> None:
        """A source keeps its files by time and size, no matter who reads them."""

    def keep_up(self) -> None:
        """A source waits for a reader as long as TCP does."""

    def close(self) -> None:
        """End the connection, from any thread; a thread that waits for packets is woken."""
        self._stream.close()


class Assembly(Batching):
    """Assembles transactions from events, and batches from transactions."""

    def __init__(
        self,
        scope: Scope | str,
        position: Position | None,
        *,
        mariadb: bool,
        source_us: Callable[[], int] = wall_clock,
        known_seconds: float = IDS_RETENTION_SECONDS,
    ) -> None:
        """`scope`: the schemas whose tables are read, or the only one; `position`: where the events begin; `source_us`:
        see above. `known_seconds`: a row that was written so long before its event has come back with a dump, and the
        target may have it already: its transaction is a `Returned`."""
        super().__init__()
        self._source_us = source_us
        self._is_quiet = False
        """Whether the newest event is a heartbeat."""
        self.quiet = _HEARD
        self.logs_all = True
        """Whether the source writes all its changes to its binlog, including those that it replicates."""
        self._scope = Scope(scope) if isinstance(scope, str) else scope
        self._tables = Tables(self._scope)
        self._known_seconds = known_seconds
        self._checksum = 0
        """The size of the checksum at the end of each event, in bytes, by the file's header."""
        self._gtids: GtidSet = (MariaDbSet if mariadb else MySqlSet).parse(position.gtids if position else "")
        begin = position or Position("")
        self._file, self._created, self._server = begin.file, begin.created, begin.server
        """The file that is being read, when it began (0: unknown), and the id of the server that wrote it."""
        self._from = begin
        self._offset, self._newest_us = begin.offset, begin.newest_us
        """Where in the file the newest transaction ended, and when it was written."""
        self._read_to = begin.offset
        """The place in the file that was last read from an event."""
        self._history = History(position)
        self._gtid: tuple[int, int, int] | tuple[str, int] | None = None
        """The GTID of the source's transaction that is being read."""
        self._ended: bytes | None = None
        """The event that ended the newest transaction, in the file that is being read."""
        self._is_inside = self._is_standalone = False
        self._left: set[str] = set()
        """Schemas whose tables of ours were renamed or dropped."""

    def joined(self, *, logs_all: bool, purged: str) -> None:
        """Take what the source said about itself before its events: see `logs_all`, and a MySQL's gtid_purged."""
        self.logs_all = logs_all
        self._history.purged = MySqlSet.parse(purged)

    def _read(self, packets: Iterable[bytes | None]) -> Iterator[Read]:
        """`packets`: events. Raises Damaged for a wrong checksum, Purged if the history is not that of the position,
        Unreadable if continuing would leave messages out."""
        last = b""
        for packet in packets:
            if packet is None:
                self._note_end()
                if self._is_inside:
                    self._place(last)
                quiet_us, self._is_quiet = wall_clock() if self._is_quiet else 0, False
                if self._passed and not self._is_inside:
                    yield self._finished()
                self.caught_up_us = quiet_us or self.caught_up_us  # only once the last batch was taken
                continue
            last = packet
            kind = packet[5]
            if kind in ROWS:
                yield from self._add_rows(kind, packet)
            elif kind == XID:
                if self._would_overflow:
                    yield self._finished()
                self._commit(packet)
                if self._is_full:
                    yield self._finished()
            elif kind == TABLE_MAP:
                self._tables.map(packet[_BODY : len(packet) - self._checksum])
            elif kind in GTIDS:
                self._begin(kind, packet)
            elif kind == QUERY:
                self._query(*statement_in(packet, self._checksum), packet)
            elif kind == events.PAYLOAD:
                yield from self._payload(packet)
            else:
                self._other(kind, packet)

    def _payload(self, packet: bytes) -> Iterator[Read]:
        """Read the events of a compressed transaction."""
        self._verify(packet)
        checksum, self._checksum = self._checksum, 0
        yield from self._read(events_in(packet, len(packet) - checksum))
        self._checksum = checksum

    def _other(self, kind: int, packet: bytes) -> None:
        """Handle an event that most transactions do not have."""
        if kind == ROTATE:
            self._rotate(packet)
        elif kind == FORMAT:
            self._file_begins(packet)
        elif kind in (events.HEARTBEAT, events.HEARTBEAT_V2):
            place = packet[_OFFSET:_FLAGS] + packet[_BODY : len(packet) - self._checksum]
            self._is_quiet, self.quiet = True, Quiet(place, self.quiet.heartbeats + 1)
        elif kind == events.GTID_LIST:
            self._history.state_before_file(gtid_list(packet[_BODY:]))
        elif kind == events.PREVIOUS_GTIDS:
            self._history.state_before_file(MySqlSet.decode(packet[_BODY:]))
        elif kind == events.XA_PREPARE:
            self._end_xa(packet)
        elif kind == events.QUERY_COMPRESSED:
            self._verify(packet)
            database, text = statement_in(packet, self._checksum)
            self._query(database, inflated(text), packet)
        elif kind == events.FRAGMENT:
            table = self._tables.of_fragment(packet)
            if table is not None:
                raise Unreadable(
                    f"the rows of an event of {table.name} are logged in parts: raise "
                    "binlog_row_event_fragment_threshold on the source, then start this bridge with --backfill"
                )
        elif kind == events.EXECUTE_LOAD:
            check_no_message(self._scope, *statement_in(packet, self._checksum, 13))
        else:
            refusal = events.refusal_of(kind, int.from_bytes(packet[18:20], "little"))
            if refusal is not None:
                raise Unreadable(refusal)

    def _position(self) -> str:
        self._note_end()
        where = self._file, self._offset, self._created, self._server
        return Position(str(self._gtids), *where, self._newest_us, self._scope.text).text

    def _note_end(self) -> None:
        """Read offset and time of the newest transaction from the event that ended it, unless that is done already."""
        if self._ended is not None:
            self._offset = self._place(self._ended)
            written_us = int.from_bytes(self._ended[1:5], "little") * 1_000_000
            # A session may set its clock to a future time (SET TIMESTAMP). A backfill would then regard everything
            # written up to that time as moved. So such a time is ignored: the backfill begins earlier, and sends more.
            if written_us <= self._source_us():
                self._newest_us = written_us
            self._ended = None

    def _place(self, packet: bytes) -> int:
        """Where in the file an event ends.

        Events give it in 32 bits, but a file may exceed 4 GiB, since no transaction is split. So the place is counted
        from the one before. That one is near enough, because an event has at most 1 GiB.
        """
        place = int.from_bytes(packet[14:18], "little")
        if place:  # 0: an event that the source made for this connection
            self._read_to += place - self._read_to & 0xFFFFFFFF
        return self._read_to

    # --- files ------------------------------------------------------------------------------------------------

    def _rotate(self, packet: bytes) -> None:
        """Another file follows. The event that the source makes at the start of a stream may have no checksum."""
        self._note_end()
        end = len(packet)
        if zlib.crc32(packet[1:-_CHECKSUM_BYTES]) == int.from_bytes(packet[-_CHECKSUM_BYTES:], "little"):
            end -= _CHECKSUM_BYTES
        self._offset = self._read_to = int.from_bytes(packet[_BODY : _BODY + 8], "little")
        self._file = packet[_BODY + 8 : end].split(b"\0")[0].decode("ascii", "replace")
        self._created = 0
        self._tables.clear()

    def _file_begins(self, packet: bytes) -> None:
        """A file begins, and says how its events are written. Raises Purged if it belongs to another history."""
        # The byte before this event's own checksum, which is always present, has the checksum kind of all events.
        self._checksum = _CHECKSUM_BYTES if packet[-_CHECKSUM_BYTES - 1] == _WITH_CRC32 else 0
        self._created, self._server = struct.unpack_from("<I", packet, 1)[0], struct.unpack_from("<I", packet, 6)[0]
        self._tables.clear()
        self._is_inside = False  # a transaction that has no end in the file before was never committed
        begin = self._from
        if (self._file, self._server) == (begin.file, begin.server) and begin.created in (0, self._created):
            self._offset = self._read_to = max(begin.offset, self._offset)  # the source skips what was read before
        self._history.file_begins(self._file, self._created, self._server)

    # --- transactions -----------------------------------------------------------------------------------------

    def _begin(self, kind: int, packet: bytes) -> None:
        """A transaction of the source begins."""
        if kind == MARIADB_GTID:
            number, domain, flags = struct.unpack_from("<QIB", packet, _BODY)
            if not self.logs_all and isinstance(self._gtids, MariaDbSet):
                check_gap(self._gtids, domain, number)
            self._gtid = (domain, int.from_bytes(packet[6:10], "little"), number)
            self._is_standalone = bool(flags & _STANDALONE)
        else:
            if kind == MYSQL_GTID:
                self._gtid = (server_uuid(packet[21:37]), struct.unpack_from("<q", packet, 37)[0])
            else:
                self._gtid = tagged_gtid(packet[_BODY:])
            self._is_standalone = True
        self._is_inside = True
        self._is_quiet, self.caught_up_us, self.quiet = False, 0, _HEARD  # even if its rows take long to arrive
        if self._open.bytes:  # the earlier transaction never ended
            self._forget()

    def _add_rows(self, kind: int, packet: bytes) -> list[Read]:
        """Add the rows of a table; returns batches if the transaction is so large that a part of it is sent now."""
        table = self._tables.of(packet)
        if table is None:
            return []
        self._verify(packet)
        if self._is_standalone:
            raise Unreadable(f"{table.name} was written outside of a transaction: is it a table of InnoDB?")
        transaction = self._open
        end = len(packet) - self._checksum
        if kind in COMPRESSED_ROWS:
            packet = plain_rows(kind, packet, end)
            end = len(packet)
        # A replayed event has its first time; it cannot have been written before its file began.
        event_seconds = max(int.from_bytes(packet[1:5], "little"), self._created)
        known_from = event_seconds - self._known_seconds
        written_us = table.add(kind, packet, end, transaction.pending, known_from)
        transaction.newest_us = written_us or transaction.newest_us
        return self._part_after(len(packet))

    def _commit(self, packet: bytes) -> None:
        """The source's transaction is committed: add its messages to the batch."""
        if self._open.bytes:
            self._take_open()
        self._end(packet)

    def _roll_back(self, packet: bytes) -> None:
        """The source's whole transaction is rolled back; the source logs it because of other tables."""
        self._forget()
        self._end(packet)

    def _forget(self) -> None:
        """Discard the open transaction, which was not committed."""
        self._open.roll_back()
        self._batch.rollback += self._open.rolled_back
        self._open.clear()

    def _end(self, packet: bytes) -> None:
        """The source's transaction has ended: move the position past it."""
        self._ended = packet
        if self._gtid is not None:
            self._gtids.add(*self._gtid)
        if self._open.bytes:
            self._open.clear()
        self._passed += 1
        self._is_inside = False

    def _end_xa(self, packet: bytes) -> None:
        """An XA transaction is prepared, and will be decided later; or it is committed in one phase."""
        if packet[_BODY]:
            self._commit(packet)
        elif self._open.is_empty:
            self._end(packet)
        else:
            raise Unreadable(
                "a table of ours was written in an XA transaction that is prepared, and may still be rolled back: a "
                "bridge cannot wait for its end; write messages in transactions without XA, then start this bridge "
                "with --backfill once this one is decided"
            )

    def _query(self, database: bytes, text: bytes, packet: bytes) -> None:
        """Handle a statement: it begins or ends a transaction, is a transaction itself, or is part of one."""
        word = text[:32].upper()
        if word.startswith((b"BEGIN", b"XA START")) or text.endswith(b"START TRANSACTION"):
            # START TRANSACTION at the end is MySQL's CREATE TABLE … SELECT, whose rows follow.
            self._is_standalone = False
        elif word.startswith(b"COMMIT"):
            if self._open.pending or self._open.prepared:
                raise Unreadable("a table of ours is not InnoDB: its rows are written outside of transactions")
            self._end(packet)
        elif word.startswith(b"ROLLBACK"):
            if b" TO " in word:
                self._open.roll_back_to(savepoint_name(text))
            else:
                self._roll_back(packet)
        elif self._is_standalone:
            self._check_tables_stay(database, text)
            if self._is_inside:
                self._end(packet)
        elif word.startswith(b"SAVEPOINT"):
            self._open.savepoint(savepoint_name(text))
        else:
            check_no_message(self._scope, database, text)

    def _check_tables_stay(self, database: bytes, text: bytes) -> None:
        """Raises Unreadable if DDL puts a view in the place of a table of ours: what is written through it is logged
        under the name of the table behind it. In one of several schemas it may be a report's, unless there was a
        table."""
        if b"half_message" not in text.lower():
            return
        words = text[:200].upper().split()
        schemas = {(match[1] or database).strip(b"`").decode("utf-8", "replace") for match in _OURS.finditer(text)}
        if b"RENAME" in text.upper() or words[:2] == [b"DROP", b"TABLE"]:
            self._left |= set(list(schemas)[: MOST_TABLES - len(self._left)])
        view = _VIEW.match(text)
        if view is None:
            return
        schema = (view[1] or database).strip(b"`").decode("utf-8", "replace")
        is_ours = self._scope.has(schema) or self._scope.has(schema.lower())  # the source may fold names
        if is_ours and (not self._scope.is_many or schema in self._left):
            raise Unreadable(
                f"a view was put in the place of {schema}.{view[2].decode()}: the binlog has the rows that are written "
                "through it under another table's name. Remove the view, put the table back under its name, then start "
                "this bridge with --backfill"
            )

    def _verify(self, packet: bytes) -> None:
        if self._checksum and zlib.crc32(packet[1:-4]) != int.from_bytes(packet[-4:], "little"):
            raise Damaged("an event of the binlog has a wrong checksum: connecting again")


_SCHEMA = rb"(?:(`(?:[^`]|``)+`|[\w$-]+)\s*\.\s*)?"
_OURS = re.compile(_SCHEMA + rb"`?\b(?:server_)?half_message\b", re.IGNORECASE)
_VIEW = re.compile(
    rb"(?:CREATE|ALTER)\b(?:(?!\bAS\b).)*?\bVIEW\s+(?:IF\s+NOT\s+EXISTS\s+)?"
    + _SCHEMA
    + rb"`?((?:server_)?half_message)`?(?:\s+AS\b|\s*\()",
    re.IGNORECASE | re.DOTALL,
)
_SAVEPOINT_NAME = re.compile(
    rb"(?:SAVEPOINT|ROLLBACK(?: WORK)? TO(?: SAVEPOINT)?)\s+(.+?)\s*\Z", re.IGNORECASE | re.DOTALL
)


def statement_in(packet: bytes, checksum: int, further: int = 0) -> tuple[bytes, bytes]:
    """The session's database and the text in a statement's event.

    `checksum`: the size of the event's checksum in bytes; `further`: how many more bytes its fixed part has than that
    of a QUERY event.
    """
    names, variables = packet[28], int.from_bytes(packet[31:33], "little")
    begin = 33 + further + variables
    return packet[begin : begin + names], packet[begin + names + 1 : len(packet) - checksum]


def savepoint_name(statement: bytes) -> bytes:
    """The name in SAVEPOINT or ROLLBACK TO, without quotes and in lower case, as the source compares names."""
    match = _SAVEPOINT_NAME.match(statement)
    if match is None:
        raise Unreadable(f"a statement about a savepoint cannot be read: {statement[:80]!r}")
    name = match[1]
    if name[:1] in (b"`", b'"'):
        name = name[1:-1].replace(name[:1] * 2, name[:1])
    return name.decode("utf-8", "replace").lower().encode()


def check_no_message(scope: Scope, database: bytes, text: bytes) -> None:
    """Raises Unreadable if a statement of a session in `database` may have written to a table of ours."""
    if b"half_message" in text.lower() and scope.is_named_in(database, text):
        raise Unreadable(
            f"a session wrote to a table of ours in STATEMENT format ({text[:80].decode('utf-8', 'replace')} …): "
            "set binlog_format = ROW, then start this bridge with --backfill"
        )
