"""One connection to a source's slot: the messages that it decodes, and what is confirmed to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass

import psycopg
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.errors import Purged
from notify.binlog_bridge.postgresql.messages import EPOCH_US
from notify.binlog_bridge.postgresql.position import MOMENT, Position, lsn_of, lsn_text
from notify.binlog_bridge.postgresql.replication import Identity, Replication, ending, lost_history, refusal
from notify.binlog_bridge.postgresql.slot import Slot, is_lost
from notify.errors import Unavailable
from notify.runtime.clock import wall_clock

STATUS_SECONDS = 1.0
"""How often the source is told what is stored, and asked how far it has sent."""
SILENT_SECONDS = 300.0
"""After this time without a word the connection is regarded as lost. A source that decodes a large transaction of other
tables is silent for long, and would begin it again after each new connection; a machine that is gone is noticed by TCP
within half a minute."""
_DATA, _KEEPALIVE = b"wk"
_STATUS = struct.Struct(">cQQQqB")
_PROGRESS = struct.Struct(">QqB")
_REMEDY = (
    "Nothing was skipped: start with --backfill, which sends the missing messages from the tables, and then continues"
)


def published_anew(names: str) -> str:
    """Why a slot may lack rows after a change of publications or tables with these names."""
    return (
        f"what the source publishes was changed since this bridge looked last ({names}: altered, or removed and added "
        f"again): the slot lacks rows that were written in between. {_REMEDY}"
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """The source's word on its progress: everything before `sent_to` has been sent. `caught_up_us`: when there was no
    more than that, by this machine's clock; 0: there is more."""

    sent_to: int
    caught_up_us: int


class WalStream:
    """A connection that reads a slot from a position on, until it ends."""

    def __init__(self, url: URL, slot: Slot, position: Position, published: str = "") -> None:
        """`published`: what the source publishes now; "": that is not compared with the position."""
        self._url = url
        self._slot = slot
        self._position = position
        self._published = published
        self._replication: Replication | None = None
        self._asking: psycopg.Connection[tuple[str]] | None = None
        """A plain connection, which tells where the log ends."""
        self._socket: socket.socket | None = None
        """A second name of the replication connection's socket, by which another thread ends it."""
        self._is_closed = False
        self._confirmed = self._received = position.lsn
        self._said_at = self._heard_at = 0.0
        self._end = 0
        self._asked_us = 0
        """Where the log ended when that was last asked, and when that was."""

    def connect(self) -> Identity:
        """The server that answers. Raises Purged if the position is gone or foreign,
        Unavailable if the source does not answer, Unfit if it refuses this user."""
        try:
            return self._connect()
        except BaseException:
            self._release()
            raise

    def _connect(self) -> Identity:
        self._replication = replication = Replication(self._url)
        self._socket = socket.socket(fileno=os.dup(replication.pgconn.socket))
        identity = replication.identity()
        self._check_history(replication, identity)
        self._check_slot(replication)
        before, now = (text.partition(MOMENT)[0] for text in (self._position.published, self._published))
        if before and now and before != now:
            raise Purged(published_anew(", ".join(self._slot.publications)))
        names = ",".join(f'"{name}"' for name in self._slot.publications)
        replication.command(
            f'START_REPLICATION SLOT "{self._slot.name}" LOGICAL {self._position.shown} '
            f"(proto_version '1', publication_names '{names}', binary 'true', messages 'true')"
        )
        self._asking = replication.plain_connection()
        self._heard_at = time.monotonic()
        return identity

    def _check_history(self, replication: Replication, identity: Identity) -> None:
        """Raises Purged if the position is not part of the source's history."""
        position = self._position
        system, timeline, started = identity
        if position.system and position.system != system:
            raise Purged(
                f"the source is another cluster ({system}) than that of this bridge's position ({position.system}). "
                f"{_REMEDY}"
            )
        end = lsn_of(replication.command("SELECT pg_current_wal_flush_lsn()")[0][0])
        if position.timeline and position.timeline != timeline:
            left_at = lost_history(replication, position.timeline, position.lsn, timeline)
            if left_at is not None:
                raise Purged(
                    f"the source was promoted at {lsn_text(left_at)}, and this bridge has already moved what the old "
                    f"primary wrote up to {position.shown}: an audit names messages whose transactions were lost "
                    f"(GHOST). {_REMEDY}"
                )
        # A snapshot of a disk has the timeline that it had, and its log soon passes the position. But the server still
        # knows where its last recovery ended.
        recovered = replication.command("SELECT pg_last_wal_replay_lsn()")[0][0]
        if recovered and started != position.started > 0 and lsn_of(recovered) < position.lsn:
            raise Purged(
                f"the source was started again since this bridge read it, and found its log up to "
                f"{lsn_text(lsn_of(recovered))} only, before this bridge's position {position.shown}: it was restored "
                f"from a snapshot of its disk, or has lost its last transactions. {_REMEDY}"
            )
        if position.lsn > end:
            raise Purged(
                f"the source's log ends at {lsn_text(end)}, before this bridge's position {position.shown}: it was "
                f"restored from a backup, or is a new primary without the old one's last transactions. {_REMEDY}"
            )

    def _check_slot(self, replication: Replication) -> None:
        """Raises Purged if the slot does not have what follows the position."""
        rows = replication.command(
            f"SELECT to_jsonb(s) FROM pg_replication_slots s WHERE s.slot_name = '{self._slot.name}'"
        )
        if not rows:
            raise Purged(f"the source has no slot {self._slot.name}, so that its log may lack messages. {_REMEDY}")
        row = json.loads(rows[0][0])
        if is_lost(row):
            why = row.get("invalidation_reason") or "this bridge was down until max_slot_wal_keep_size was used up"
            raise Purged(f"the source has given up slot {self._slot.name} ({why}). {_REMEDY}")
        confirmed = lsn_of(row["confirmed_flush_lsn"] or "0/0")
        if confirmed > self._position.lsn:
            raise Purged(
                f"slot {self._slot.name} continues at {lsn_text(confirmed)}, after this bridge's position "
                f"{self._position.shown}: it was recreated, another program has read it, or the queue was restored "
                f"from a backup. {_REMEDY}"
            )

    def confirm(self, lsn: int) -> None:
        """Let the source forget what is before a place; said with the next status. From any thread."""
        self._confirmed = max(self._confirmed, lsn)

    def close(self) -> None:
        """End the connection, from any thread; the reading thread is woken, and closes it."""
        self._is_closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        for connection in (self._socket, self._replication, self._asking):
            if connection is not None:
                connection.close()

    def messages(self) -> Generator[bytes | Kept | None, None, None]:
        """Messages of pgoutput in order, what the source says of its progress, and None after the last received so
        far. Raises Unavailable when the connection ends, Purged when the slot is lost meanwhile."""
        assert self._replication is not None
        pgconn = self._replication.pgconn
        try:
            while not self._is_closed:
                size, data = pgconn.get_copy_data(1)
                if size > 0:
                    kind = data[0]
                    if kind == _DATA:
                        yield bytes(data[25:])
                    elif kind == _KEEPALIVE:
                        yield self._progress(bytes(data[1:]))
                    continue
                if size < 0:
                    raise self._ended()
                yield None
                self.keep_up()
                self._wait()
        except psycopg.Error as error:
            raise ending(error) from error
        finally:
            self._release()

    def _ended(self) -> Exception:
        """Why the source ended the copy."""
        assert self._replication is not None
        result = self._replication.pgconn.get_result()
        if result is not None and result.error_message:
            return ending(psycopg.errors.error_from_result(result))
        return Unavailable("the source ended the stream")

    def _progress(self, data: bytes) -> Kept:
        sent_to, _, wants_status = _PROGRESS.unpack_from(data)
        self._received = max(self._received, sent_to)
        if wants_status:
            self._said_at = 0.0
        return Kept(sent_to, self._asked_us if self._asked_us and sent_to >= self._end else 0)

    def _wait(self) -> None:
        """Wait until something comes, at most until the next status. Raises Unavailable."""
        assert self._replication is not None
        pgconn = self._replication.pgconn
        left = max(0.0, self._said_at + STATUS_SECONDS - time.monotonic())
        ready, _, _ = select.select([pgconn.socket], [], [], left)
        now = time.monotonic()
        if ready:
            pgconn.consume_input()
            self._heard_at = now
        elif now - self._heard_at > SILENT_SECONDS:
            raise Unavailable(f"the source has been silent for {SILENT_SECONDS:g} s: connecting again")

    def keep_up(self) -> None:
        """Tell the source what is stored, and ask how far it has sent, if STATUS_SECONDS have passed."""
        now = time.monotonic()
        if now - self._said_at < STATUS_SECONDS:
            return
        assert self._replication is not None and self._asking is not None
        self._said_at = now
        try:
            asked_us = wall_clock()
            self._end = lsn_of(str(self._asking.execute("SELECT pg_current_wal_flush_lsn()").fetchone()[0]))  # type: ignore[index]
            self._asked_us = asked_us
            status = _STATUS.pack(
                b"r", max(self._received, self._confirmed), self._confirmed, self._confirmed,
                wall_clock() - EPOCH_US, True,
            )  # fmt: skip
            self._replication.pgconn.put_copy_data(status)
            self._replication.pgconn.flush()
        except psycopg.Error as error:
            raise refusal(error) from error
