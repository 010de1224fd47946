"""Tables of ours in a binlog: which they are, and how rows of them are read."""

from __future__ import annotations

import msgspec

from notify.binlog_bridge import decoder
from notify.binlog_bridge.decoder import TableMap, Unreadable
from notify.outbox import LOCAL, SERVER
from notify.wire import BridgedTransaction, PackedMessage

OURS = (LOCAL.table.name, SERVER.table.name)
MOST_READERS = 64
UPDATES = (24, 31)
"""Types of events that hold rows as they were and as they are."""
WITH_EXTRA = (30, 31)
"""Types of events whose head says how long it is."""
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


class TableRows:
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

    def add(self, kind: int, packet: bytes, end: int, transactions: list[BridgedTransaction]) -> int:
        """Add an event's rows to the transactions that they belong to.

        The time of the last row of ours in microseconds, by the source's clock; 0 where there is none. Raises
        Unreadable.
        """
        at = 28
        if kind in WITH_EXTRA:
            at += int.from_bytes(packet[28:30], "little")
        count, at = decoder.length_encoded(packet, at)
        if count != self.count:
            raise Unreadable(f"a row event of {self.name} has {count} columns where its table map has {self.count}")
        update = kind in UPDATES
        for _ in range(1 + update):
            if packet[at : at + self.bitmap] != self.all_present:
                raise Unreadable(
                    f"{self.name} is logged with minimal images: set binlog_row_image = FULL on the source"
                )
            at += self.bitmap
        newest: bytes | None = None
        last = transactions[-1] if transactions else None
        while at < end:
            was = None
            if update:
                was, at = self.state_before(packet, at)
            row = self.read(packet, at)
            at = row[-1]
            if self.is_server:
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
                transactions.append(last)
            last.messages.append(
                PackedMessage(
                    topic=row[3].decode("ascii"),
                    body=row[7] or b"",
                    key=row[4].decode() if row[4] is not None else None,
                    tag=row[5].decode() if row[5] is not None else None,
                    headers=msgspec.json.decode(row[6]) if row[6] else None,
                    delay=decoder.double(row[8]),
                    deliver_at=decoder.moment(row[9], self.deliver_fraction) if row[9] is not None else None,
                    ttl=decoder.double(row[10]),
                )
            )
            newest = written
        if newest is not None:
            at_moment = decoder.moment(newest, self.time_fraction)
            return int(at_moment.timestamp() * 1_000_000)
        return 0


class Tables:
    """The tables of ours, by the numbers that the binlog gives them for a while."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._by_number: dict[int, TableRows | None] = {}
        self._made: dict[bytes, TableRows] = {}

    def of(self, packet: bytes) -> TableRows | None:
        """The table that an event has rows of; None for one that is not ours."""
        return self._by_number.get(int.from_bytes(packet[20:26], "little"))

    def clear(self) -> None:
        """The numbers mean nothing any more."""
        self._by_number.clear()

    def map(self, body: bytes) -> None:
        """Note which table a number means from now on, and how its rows are read."""
        number = int.from_bytes(body[:6], "little")
        key = body[6:]
        rows = self._made.get(key)
        if rows is None:
            schema, name = decoder.names_of(body)
            if schema != self._schema or name not in OURS:
                self._by_number[number] = None
                return
            if len(self._made) > MOST_READERS:
                self._made.clear()
            rows = self._made[key] = TableRows(decoder.table_map(body))
        self._by_number[number] = rows
