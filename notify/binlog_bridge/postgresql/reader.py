"""Reading PostgreSQL's log: from the messages of a slot to batches of committed transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from sqlalchemy.engine.url import URL

from notify.binlog_bridge.batching import BATCH_BYTES, Batching
from notify.binlog_bridge.errors import Unreadable
from notify.binlog_bridge.log import Read
from notify.binlog_bridge.postgresql import messages
from notify.binlog_bridge.postgresql.messages import BEGIN, COMMIT, HARMLESS, INSERT, MESSAGE, RELATION, UPDATE
from notify.binlog_bridge.postgresql.position import Position
from notify.binlog_bridge.postgresql.replication import Identity
from notify.binlog_bridge.postgresql.slot import Slot
from notify.binlog_bridge.postgresql.stream import Kept, WalStream
from notify.binlog_bridge.postgresql.tables import Row, Tables
from notify.binlog_bridge.rows import Logged, Returned
from notify.binlog_bridge.scope import Scope
from notify.client.tables.purge import IDS_RETENTION_SECONDS
from notify.protocol import logged
from notify.protocol.wire import BridgedTransaction


class WalReader:
    """One connection to a source's slot, from a position on. See Reader."""

    def __init__(
        self,
        url: URL,
        slot: Slot,
        position: Position,
        *,
        scope: Scope,
        known_seconds: float = IDS_RETENTION_SECONDS,
        published: Callable[[], str] = str,
        most_bytes: Callable[[], int] = lambda: BATCH_BYTES,
    ) -> None:
        """`scope`: whose tables are read. `known_seconds`: see Assembly. `published`: what the source publishes, as it
        was looked at last: see Position. `most_bytes`: see Batching."""
        self._stream = WalStream(url, slot, position, published())
        self._assembly = Assembly(scope, position, known_seconds=known_seconds, published=published)
        self._assembly.most_bytes = most_bytes

    @property
    def caught_up_us(self) -> int:
        return self._assembly.caught_up_us

    def connect(self) -> None:
        self._assembly.identity = self._stream.connect()

    def batches(self) -> Iterator[Read]:
        with closing(self._stream.messages()) as received:  # also where a message cannot be read
            yield from self._assembly.batches(received)

    def confirm(self, position: str) -> None:
        stored = Position.of(position)
        if stored is not None:
            self._stream.confirm(stored.lsn)

    def keep_up(self) -> None:
        self._stream.keep_up()

    def close(self) -> None:
        self._stream.close()


class Assembly(Batching):
    """Assembles transactions from messages of pgoutput, and batches from transactions.

    The source sends a transaction when it is committed, without what was rolled back to a savepoint. One that was
    prepared (PREPARE TRANSACTION) is sent when it is committed, too.
    """

    def __init__(
        self,
        scope: Scope,
        position: Position,
        *,
        known_seconds: float = IDS_RETENTION_SECONDS,
        published: Callable[[], str] = str,
    ) -> None:
        """`scope`: the schemas whose tables are read; `position`: where the messages begin. `known_seconds`: a row that
        was written so long before its commit has come back with a dump, and the target may have it already: its
        transaction is a `Returned`. `published`: see WalReader."""
        super().__init__()
        self._published = published
        self._scope = scope
        self._tables = Tables(scope)
        self._known_us = round(known_seconds * 1e6)
        self._lsn, self._newest_us = position.lsn, position.newest_us
        self.identity = Identity(position.system, position.timeline, position.started)
        """The server, and which of its histories, from which the messages come."""
        self._is_inside = False
        self._quiet_us = 0
        """When the source had no more to send; `caught_up_us` once the batch before it was taken."""
        self._commit_us = 0
        """When the transaction that is being read was committed."""
        self._decided: dict[str, list[Row]] = {}
        """Rows of the server's table that became COMMITTED in it, by the transaction. One statement changes the rows of
        many transactions, in the order in which they lie in the table. So they wait for the commit, in memory."""

    def _read(self, received: Iterable[bytes | Kept | None]) -> Iterator[Read]:
        """`received`: messages of pgoutput, and what the source says between them of its progress."""
        for data in received:
            if data is None:
                if self._passed and not self._is_inside:
                    yield self._finished()
                self.caught_up_us = self._quiet_us or self.caught_up_us  # only once the last batch was taken
                continue
            if isinstance(data, Kept):
                self._note_progress(data)
                continue
            kind = data[0]
            if kind in (INSERT, UPDATE):
                yield from self._add_row(kind, data)
            elif kind == COMMIT:
                yield from self._commit(data)
            elif kind == BEGIN:
                self._begin(data)
            elif kind == MESSAGE:
                yield from self._add_logged(data)
            elif kind == RELATION:
                self._tables.define(data)
            elif kind not in HARMLESS:
                raise Unreadable(f"the source sent a message of a kind ({chr(kind)!r}) that was not asked for")

    def _position(self) -> str:
        system, timeline, started = self.identity
        what = self._newest_us, self._published(), self._scope.text
        return Position(self._lsn, system, timeline, *what, started).text

    def _note_progress(self, kept: Kept) -> None:
        """The source has sent everything before a place, at which no transaction of ours may have ended."""
        if self._is_inside:
            return
        if kept.sent_to > self._lsn:
            self._lsn = kept.sent_to
            self._passed += 1
        self._quiet_us = kept.caught_up_us or self._quiet_us

    def _begin(self, data: bytes) -> None:
        self._is_inside = True
        self.caught_up_us = self._quiet_us = 0  # even if its rows take long to arrive
        self._commit_us = messages.commit_us(data)

    def _commit(self, data: bytes) -> Iterator[Read]:
        """The source's transaction is whole: add its messages to the batch."""
        for _, rows in sorted(self._decided.items()):  # the order of ids, in which MySQL changes its rows
            rows.sort(key=lambda row: row.message_no)
            for row in rows:
                self._add(row)
            yield from self._part_after(sum(_size_of(row) for row in rows))
        if self._would_overflow:
            yield self._finished()
        if self._open.bytes:
            self._open.newest_us = self._commit_us
            self._take_open()
        self._decided = {}
        self._lsn = messages.commit_end(data)
        self._newest_us = self._commit_us
        self._passed += 1
        self._is_inside = False
        if self._is_full:
            yield self._finished()

    def _add_row(self, kind: int, data: bytes) -> list[Read]:
        table = self._tables.of(data)
        if table is None:
            return []
        row = table.inserted(data) if kind == INSERT else table.updated(data)
        if row is None:
            return []
        if kind == UPDATE:
            self._decided.setdefault(row.transaction_id, []).append(row)
            return []
        self._add(row)
        return self._part_after(len(data))

    def _add_logged(self, data: bytes) -> list[Read]:
        """Add a transaction that stands in the log only. Other programs write to the log, too."""
        belongs, prefix, content = messages.message(data)
        if prefix != logged.PREFIX or not belongs:
            return []
        try:
            found = logged.decode(content)
        except logged.NewerVersion as error:
            raise Unreadable(f"the log has {error}, which this version does not know: upgrade the bridge") from None
        if found is None or not self._scope.has(found.home):
            return []
        transaction = Logged(id=found.id, producer_group=found.producer_group, messages=found.messages)
        transaction.__dict__["home"] = found.home
        self._open.pending.append(transaction)
        return self._part_after(len(data))

    def _add(self, row: Row) -> None:
        """Add a row's message to its transaction."""
        transaction = self._open.pending[-1] if self._open.pending else None
        if transaction is None or transaction.id != row.transaction_id:
            is_old = 0 < row.written_us < self._commit_us - self._known_us
            kind = Returned if is_old else BridgedTransaction
            transaction = kind(id=row.transaction_id, producer_group=row.producer_group, messages=[])
            self._open.pending.append(transaction)
        transaction.messages.append(row.message)


def _size_of(row: Row) -> int:
    """About the bytes of a row in a request."""
    return len(row.message.body or b"") + 512
