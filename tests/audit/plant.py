"""Plants faults of each class in copies of a log and a database; an audit must find these and no others."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox
from notify.protocol import ids
from notify.protocol.wire import BridgeBatch
from notify.server.delivery.settling import dead_payload
from notify.storage.groups import SettleKind
from notify.storage.log.entry import ENTRY, ENTRY_SIZE, Entry, EntryKind
from notify.storage.log.format import FRAME_HEADER, FRAME_HEADER_SIZE, SEGMENT_HEADER_SIZE, frame
from notify.storage.log.lookup import entries_of
from notify.storage.log.records import RECORD_HEADER, RECORD_HEADER_SIZE, RecordType, encode
from notify.storage.log.store import LogStore
from notify.storage.names import dead_letter_topic, redriven_id
from notify.storage.records import NewMessage, NewTransaction, State, StoredMessage
from notify.storage.sql.rows import moment_of
from notify.storage.topics import Topic
from tests.audit.leaving import Leaving, records_beside
from tools.bench.made_run import (
    CONSUMERS,
    KEYS,
    PRODUCERS,
    SOURCE,
    TOPICS,
    Made,
    payload_of,
    topic_of,
    transaction_id,
)

FILLER = RECORD_HEADER.pack(ENTRY_SIZE, RecordType.META, 0, 0) + encode(["nothing", "-" * 61])
"""A meaningless record of an entry's size: it replaces a removed entry, so that a frame keeps its length."""
assert len(FILLER) == ENTRY_SIZE
NOTHING = ENTRY.pack(EntryKind.CARRY, *([0] * 10), bytes(16), 0, 0, 0)


@dataclass
class Planted:
    """The planted message ids by class; gaps of a bridge have numbers instead of ids."""

    ids: dict[str, set[str]] = field(default_factory=dict)
    left: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """Those of LEFT_OUT, by group and by what they left its queue."""

    def add(self, name: str, message: bytes | str) -> None:
        text = message if isinstance(message, str) else f"{ids.to_text(message)}.0"
        self.ids.setdefault(name, set()).add(text)


def copied(log: Path, to: Path) -> Path:
    """Copy a log without its derived files."""
    to.mkdir()
    for file in log.iterdir():
        if file.suffix in (".log", ".ckpt"):
            shutil.copy(file, to / file.name)
    return to


def edit(log: Path, change: Callable[[bytes], bytes | None]) -> None:
    """Rewrite every frame with changed entries of halves and outcomes; None removes one. Checksums are right: a faulty
    server wrote this log, and no disk damaged it."""
    for path in sorted(log.glob("*.log")):
        data = bytearray(path.read_bytes())
        at = SEGMENT_HEADER_SIZE
        while at + FRAME_HEADER_SIZE <= len(data) and data[at : at + 4] == b"NFR1":
            _, length, _, records, base, durable, time_us = FRAME_HEADER.unpack_from(data, at)
            body = bytes(data[at + FRAME_HEADER_SIZE : at + FRAME_HEADER_SIZE + length])
            fresh, more = _edited(body, change)
            if fresh != body:
                data[at : at + FRAME_HEADER_SIZE + length] = frame(fresh, records + more, base, durable, time_us)
            at += FRAME_HEADER_SIZE + length
        path.write_bytes(data)


def _edited(body: bytes, change: Callable[[bytes], bytes | None]) -> tuple[bytes, int]:
    out: list[bytes] = []
    at = fillers = 0
    while at < len(body):
        length, kind, flags, count = RECORD_HEADER.unpack_from(body, at)
        first = at + RECORD_HEADER_SIZE
        entries = [body[first + i * ENTRY_SIZE : first + (i + 1) * ENTRY_SIZE] for i in range(count)]
        if kind == RecordType.HALF:
            # Later payloads must keep their positions, so a meaningless entry takes the place.
            out.append(body[at:first])
            out += [change(entry) or NOTHING for entry in entries]
            out.append(body[first + count * ENTRY_SIZE : at + length])
        elif kind == RecordType.OUTCOME:
            kept = [e for e in (change(entry) for entry in entries) if e is not None]
            out.append(RECORD_HEADER.pack(RECORD_HEADER_SIZE + len(kept) * ENTRY_SIZE, kind, flags, len(kept)))
            out += kept
            out += [FILLER] * (count - len(kept))
            fillers += count - len(kept)
        else:
            out.append(body[at : at + length])
        at += length
    return b"".join(out), fillers


class Planter:
    """Plants `each` faults of each class. `engine` is that of a copy, too: its rows are changed."""

    def __init__(self, made: Made, log: Path, engine: sa.Engine, each: int, seed: int = 1) -> None:
        self.planted = Planted()
        self._made = made
        self._log = log
        self._engine = engine
        self._each = each
        self._chance = random.Random(seed)
        self._free = self._chance.sample(range(made.count), 13 * each)
        self._next = made.count

    def _take(self, count: int) -> list[int]:
        """Numbers of transactions without a planted fault."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    async def plant(self) -> Planted:
        self._in_the_log()
        self._in_the_database()
        await self._by_the_store()
        self._in_the_bytes()
        return self.planted

    # --- removed and changed entries --------------------------------------------------------------------------

    def _in_the_log(self) -> None:
        lost, flipped = self._take(self._each), self._take(self._each - self._each // 2)
        gone = {self._made.id(n) for n in lost}
        turned = {self._made.id(n) for n in flipped}
        for n in lost:
            self.planted.add("LOST", self._made.id(n))
        for n in flipped:
            self.planted.add("CONFLICT", self._made.id(n))

        def change(entry: bytes) -> bytes | None:
            name = entry[48:64]
            if name in gone:
                return None
            if name in turned and entry[0] == EntryKind.QUEUE:
                fields = list(ENTRY.unpack(entry))
                fields[0], fields[5] = EntryKind.ROLLBACK, 0
                return ENTRY.pack(*fields)
            return entry

        edit(self._log, change)

    # --- rows -------------------------------------------------------------------------------------------------

    def _in_the_database(self) -> None:
        t, e = half_message.c, notify_inbox.c
        ghosts, tombstones, effectless = (self._take(n) for n in (self._each // 2, self._each // 2, self._each))
        with self._engine.begin() as connection:
            for n in ghosts:
                connection.execute(half_message.delete().where(t.transaction_id == ids.to_text(self._made.id(n))))
                self.planted.add("GHOST", self._made.id(n))
            for n in tombstones:
                name = ids.to_text(self._made.id(n))
                connection.execute(half_message.update().where(t.transaction_id == name).values(state="ROLLED_BACK"))
                self.planted.add("CONFLICT", self._made.id(n))
            for n in effectless:
                name = f"{ids.to_text(self._made.id(n))}.0"
                connection.execute(notify_inbox.delete().where(e.message_id == name))
                self.planted.add("ACKED_NO_EFFECT", name)
            for i in range(self._each):
                new = self._new_id()
                at = moment_of(self._at())
                if i % 2:
                    row = self._row(new, "ROLLED_BACK", topic="")
                    connection.execute(half_message.insert().values(row | {"created_at": at}))
                else:
                    message = f"{ids.to_text(new)}.0"
                    connection.execute(
                        notify_inbox.insert().values(consumer_group=CONSUMERS, message_id=message, created_at=at)
                    )
                self.planted.add("ORPHAN_ROW", new)
            connection.exec_driver_sql("CREATE TABLE ledger (message_id varchar(64), amount int)")
            doubled = self._take(self._each)
            for n in doubled:
                for _ in range(2):
                    connection.exec_driver_sql(f"INSERT INTO ledger VALUES ('{ids.to_text(self._made.id(n))}.0', 1)")
                self.planted.add("DUP_EFFECT", self._made.id(n))
            for n in self._take(self._each):
                name = f"{ids.to_text(self._made.id(n))}.0"
                connection.execute(notify_inbox.delete().where(e.message_id == name))
                connection.exec_driver_sql(f"INSERT INTO ledger VALUES ('{name}', 1)")
                self.planted.add("UNGUARDED", name)
            self._odd_rows(connection)
            for n in self._take(self._each // 2):
                connection.exec_driver_sql(f"INSERT INTO ledger VALUES ('{ids.to_text(self._made.id(n))}.0', 1)")

    def _odd_rows(self, connection: sa.Connection) -> None:
        """Plant local rows that nobody wrote like this."""
        half = self._each // 2
        changes: list[tuple[str, int, dict[str, object]]] = [
            ("ALTERED", half, {"topic": "order.gone"}),
            ("ALTERED", self._each - half, {"digest": 1}),
            ("MISDATED", self._each, {}),
            ("MALFORMED", half, {"state": "GARBAGE"}),
        ]
        for finding, count, change in changes:
            for n in self._take(count):
                values = change or {"created_at": moment_of(self._made.at(n) - 3 * 3_600_000_000)}
                row = half_message.c.transaction_id == ids.to_text(self._made.id(n))
                connection.execute(half_message.update().where(row).values(values))
                self.planted.add(finding, self._made.id(n))
        # By their targets, and by a person.
        for finding, relayed in (("UNSENT", 2), ("DROPPED", 3)):
            for _ in range(self._each):
                new = self._new_id()
                kept = {"mode": "outbox", "relayed": relayed, "created_at": moment_of(self._at())}
                connection.execute(half_message.insert().values(self._row(new) | kept))
                self.planted.add(finding, new)
        for i in range(self._each - self._each // 2):
            row = self._row(self._made.id(0)) | {"transaction_id": f"no id {i}", "created_at": moment_of(self._at())}
            connection.execute(half_message.insert().values(row))
            self.planted.add("MALFORMED", f"no id {i}")

    def _row(self, name: bytes, state: str = "COMMITTED", topic: str = "order.1") -> dict[str, object]:
        return {
            "transaction_id": ids.to_text(name), "message_no": 0, "producer_group": PRODUCERS, "mode": "half",
            "state": state, "shards": "", "topic": topic, "relayed": 1,
        }  # fmt: skip

    def _at(self) -> int:
        return self._made.at(self._next)

    def _new_id(self) -> bytes:
        self._next += 1
        return transaction_id(self._next, self._at())

    # --- acts of a faulty server ------------------------------------------------------------------------------

    async def _by_the_store(self) -> None:
        store = LogStore(self._log)
        await store.open(self._at())
        rows: dict[bytes, str] = {}  # ids of transactions with a local row, and the topics of their messages
        effects: list[bytes] = []
        await self._ghosts(store, effects)
        await self._doubles(store)
        await self._doubts(store, rows)
        await self._again(store, rows, effects)
        await self._disorder(store, rows, effects)
        await self._gaps(store, rows, effects)
        await self._dead(store, rows)
        await self._left_out(store)
        # Done last, because later messages of the queue would be settled in one range with these.
        await self._undelivered(store, rows)
        await store.sync()
        await store.close()
        with self._engine.begin() as connection:
            at = moment_of(self._at())
            if rows:
                connection.execute(
                    half_message.insert(), [self._row(r, topic=topic) | {"created_at": at} for r, topic in rows.items()]
                )
            if effects:
                connection.execute(
                    notify_inbox.insert(),
                    [
                        {"consumer_group": CONSUMERS, "message_id": f"{ids.to_text(n)}.0", "created_at": at}
                        for n in effects
                    ],
                )

    def _transaction(
        self, name: bytes, key: str = "k", topic: str = "order.1", group: str = PRODUCERS
    ) -> NewTransaction:
        message = NewMessage(topic, payload_of(TOPICS * KEYS + 1).replace(b"order.1", topic.encode()), key)
        return NewTransaction(name, group, [message], SOURCE)

    async def _committed(self, store: LogStore, names: list[bytes], topic: str = "order.1", key: str = "k") -> int:
        """Store and commit messages; return the offset of the first."""
        first = store.bounds(topic, 0)[1]
        transactions = [self._transaction(name, key, topic) for name in names]
        await store.put(transactions, self._at())
        await store.decide([(name, PRODUCERS, State.COMMITTED) for name in names], self._at())
        return first

    async def _settled(self, store: LogStore, topic: str, first: int, count: int) -> None:
        await store.settle(CONSUMERS, topic, 0, [(first, count)], SettleKind.ACK, self._at())

    async def _ghosts(self, store: LogStore, effects: list[bytes]) -> None:
        """Plant deliveries without row and half."""
        names = [self._new_id() for _ in range(self._each - self._each // 2)]
        first = store.bounds("order.1", 0)[1]
        await store.put([replace_committed(self._transaction(name)) for name in names], self._at())
        await self._settled(store, "order.1", first, len(names))
        for name in names:
            self.planted.add("GHOST", name)
        effects += names

    async def _doubles(self, store: LogStore) -> None:
        """Plant second entries of messages that are in the queue."""
        for n in self._take(self._each):
            name = self._made.id(n)
            topic = topic_of(n)
            queue = store.state.queue(topic, 0)
            entries = entries_of(store.state, store.journal, name)
            entry = next(e for e in map(Entry.of, entries) if e.kind == EntryKind.QUEUE)
            offset = queue.next_offset
            queue.next_offset = offset + 1
            store.journal.reserve(4096)
            store.journal.append(RecordType.OUTCOME, b"", [ENTRY.pack(*entry._replace(offset=offset))], [queue])
            await store.sync()
            await self._settled(store, topic, offset, 1)
            self.planted.add("DUP_ENQUEUE", name)

    async def _doubts(self, store: LogStore, rows: dict[bytes, str]) -> None:
        """Plant undecided halves; the database committed every other one."""
        for i in range(self._each):
            name = self._new_id()
            await store.put([self._transaction(name)], self._at())
            if i % 2:
                rows[name] = "order.1"
            self.planted.add("IN_DOUBT", name)

    async def _again(self, store: LogStore, rows: dict[bytes, str], effects: list[bytes]) -> None:
        names = [self._new_id() for _ in range(self._each)]
        first = await self._committed(store, names)
        store.attempted(CONSUMERS, "order.1", 0, [(first + i, 1, 0) for i in range(len(names))])
        await self._settled(store, "order.1", first, len(names))
        for name in names:
            self.planted.add("REDELIVERED", name)
        rows |= dict.fromkeys(names, "order.1")
        effects += names

    async def _disorder(self, store: LogStore, rows: dict[bytes, str], effects: list[bytes]) -> None:
        """Plant pairs of messages of a key in an ordered topic, the second settled first."""
        for i in range(self._each):
            pair = [self._new_id(), self._new_id()]
            first = await self._committed(store, pair, "order.0", f"pair-{i}")
            await self._settled(store, "order.0", first + 1, 1)
            await self._settled(store, "order.0", first, 1)
            self.planted.add("DISORDER", pair[0])
            rows |= dict.fromkeys(pair, "order.0")
            effects += pair

    async def _gaps(self, store: LogStore, rows: dict[bytes, str], effects: list[bytes]) -> None:
        """Plant gaps between a bridge's positions."""
        stood = ""
        for i in range(self._each + 1):
            name = self._new_id()
            begin = f"0-1-{10 * i}" if i else ""
            if i:
                state = store.state.bridges["shop"]
                store.state.bridges["shop"] = msgspec.structs.replace(state, position=begin)
                self.planted.add("BRIDGE_GAP", f"{stood} {begin}")
            first = store.bounds("order.1", 0)[1]
            stood = f"0-1-{10 * i + 5}"
            batch = BridgeBatch(epoch=1, expected_position=begin, position=stood, claim=not i)
            await store.append_from_bridge("shop", batch, [replace_committed(self._transaction(name))], self._at())
            await self._settled(store, "order.1", first, 1)
            rows[name] = "order.1"
            effects.append(name)

    async def _dead(self, store: LogStore, rows: dict[bytes, str]) -> None:
        """Plant dead letters; every second one more is sent again."""
        letters = dead_letter_topic(CONSUMERS)
        await store.create_topic(Topic(letters))
        for i in range(self._each + self._each // 2):
            name = self._new_id()
            first = await self._committed(store, [name])
            (message,) = store.read("order.1", 0, first, 1, 1 << 20)
            assert isinstance(message, StoredMessage)
            payload = dead_payload(CONSUMERS, message, 16, f"reason {i % 3}", 0)
            store.dead_letter_soon(CONSUMERS, [(message, payload)], self._at())
            rows[name] = "order.1"
            if i < self._each:
                self.planted.add("DEAD", name)
                continue
            again = NewMessage("order.1", payload_of(1), "k")
            offset = store.bounds("order.1", 0)[1]
            await store.put([NewTransaction(redriven_id(letters, name, i), "", [again], committed=True)], self._at())
            await store.settle(CONSUMERS, "order.1", 0, [(offset, 1)], SettleKind.FILTERED, self._at())

    async def _left_out(self, store: LogStore) -> None:
        """Plant messages that left the queues of groups unsettled, by each cause, and some that only look like that."""
        with records_beside(self._log) as records:
            each = max(1, self._each // 9)  # so many for each cause
            leaving = Leaving(store, self._at(), records, each, lambda: time.time_ns() // 1000)
            await leaving.plant()
        for message in leaving.ids:
            self.planted.add("LEFT_OUT", message)
        self.planted.left = leaving.left

    async def _undelivered(self, store: LogStore, rows: dict[bytes, str]) -> None:
        names = [self._new_id() for _ in range(self._each)]
        await self._committed(store, names, "order.2")
        for name in names:
            self.planted.add("UNDELIVERED", name)
        rows |= dict.fromkeys(names, "order.2")

    # --- bytes ------------------------------------------------------------------------------------------------

    def _in_the_bytes(self) -> None:
        """Change one byte of a payload, in messages of different frames."""
        by_position: dict[int, bytes] = {}
        wanted = {self._made.id(n) for n in self._chance.sample(range(self._made.count), 40 * self._each)}
        for path in sorted(self._log.glob("*.log")):
            base = int(path.stem)
            data = path.read_bytes()
            at = SEGMENT_HEADER_SIZE
            taken: list[tuple[int, int, bytes]] = []
            while at + FRAME_HEADER_SIZE <= len(data) and data[at : at + 4] == b"NFR1":
                length = FRAME_HEADER.unpack_from(data, at)[1]
                payloads = _payloads(data, at + FRAME_HEADER_SIZE, length, wanted)
                if payloads and len(by_position) + len(taken) < self._each:
                    position, size, name = payloads[0]
                    taken.append((position - base + self._chance.randrange(size), position, name))
                at += FRAME_HEADER_SIZE + length
            with path.open("r+b") as file:
                for place, position, name in taken:
                    file.seek(place)
                    was = file.read(1)[0]
                    file.seek(place)
                    file.write(bytes([was ^ self._chance.randrange(1, 256)]))
                    by_position[position] = name
                    self.planted.add("CORRUPT", name)


def _payloads(data: bytes, at: int, length: int, wanted: set[bytes]) -> list[tuple[int, int, bytes]]:
    """(position, size, id) of the payloads of halves in a frame."""
    end = at + length
    payloads = []
    while at < end:
        size, kind, _, count = RECORD_HEADER.unpack_from(data, at)
        if kind == RecordType.HALF:
            for i in range(count):
                fields = ENTRY.unpack_from(data, at + RECORD_HEADER_SIZE + i * ENTRY_SIZE)
                if fields[11] in wanted:
                    payloads.append((fields[6], fields[7], fields[11]))
        at += size
    return payloads


def replace_committed(t: NewTransaction) -> NewTransaction:
    return NewTransaction(t.id, t.producer_group, t.messages, t.source, committed=True)
