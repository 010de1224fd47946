"""Streams of a MySQL made by hand, in the form of recorded ones: what no server can be brought to write on demand."""

from __future__ import annotations

import struct
import uuid
import zlib
from datetime import UTC, datetime
from typing import Any

from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.reader import Assembly
from notify.protocol.wire import PackedBridgeBatch

SERVER = uuid.UUID("3e11fa47-71ca-11e1-9e33-c80aa9429562")
VARCHAR, LONG, LONGLONG, SHORT, FLOAT, DOUBLE, BLOB, DATETIME2, STRING = 15, 3, 8, 2, 4, 5, 252, 18, 254

COLUMNS: list[tuple[str, int, bytes]] = [
    ("transaction_id", STRING, bytes((0xFE, 36))),
    ("message_no", LONG, b""),
    ("producer_group", VARCHAR, struct.pack("<H", 127)),
    ("mode", VARCHAR, struct.pack("<H", 8)),
    ("state", VARCHAR, struct.pack("<H", 16)),
    ("shards", VARCHAR, struct.pack("<H", 4096)),
    ("topic", VARCHAR, struct.pack("<H", 127)),
    ("key", VARCHAR, struct.pack("<H", 4096)),
    ("tag", VARCHAR, struct.pack("<H", 127)),
    ("headers", BLOB, b"\x03"),
    ("body", BLOB, b"\x03"),
    ("delay", FLOAT, b"\x04"),
    ("deliver_at", DATETIME2, b"\x06"),
    ("ttl", FLOAT, b"\x04"),
    ("relayed", SHORT, b""),
    ("created_at", DATETIME2, b"\x06"),
    ("digest", LONGLONG, b""),
]
COLLATIONS = dict.fromkeys(("transaction_id", "producer_group", "topic", "tag"), 65) | {"key": 46, "body": 63}
"""The numbers of the collations of texts; of others it is the default."""
DEFAULT_COLLATION = 255
NULLABLE = ("key", "tag", "headers", "body", "delay", "deliver_at", "ttl", "digest", "decided_at")


def lenenc(n: int) -> bytes:
    if n < 251:
        return bytes((n,))
    return b"\xfc" + struct.pack("<H", n) if n < 1 << 16 else b"\xfe" + struct.pack("<Q", n)


def event(kind: int, body: bytes) -> bytes:
    """A packet: OK, the header, the body; no checksum."""
    return b"\0" + struct.pack("<IBIIIH", 1_800_000_000, kind, 1, 19 + len(body), 4242, 0) + body


def gtid(number: int) -> bytes:
    logical_clock = b"\2" + struct.pack("<QQ", number - 1, number)
    written_us, size, version = bytes.fromhex("d1f799d7556106"), b"\xfc\xda\x0a", struct.pack("<I", 90_704)
    return event(33, b"\0" + SERVER.bytes + struct.pack("<q", number) + logical_clock + written_us + size + version)


def query(text: bytes) -> bytes:
    variables = bytes.fromhex("0000000000012000a04500000000060373746404ff00ff00ff0012ff00")
    return event(2, struct.pack("<IIBHH", 8, 0, 4, 0, len(variables)) + variables + b"shop\0" + text)


def summed(packet: bytes) -> bytes:
    """The packet, whose body has no checksum, with its length and checksum."""
    longer = packet[:10] + struct.pack("<I", len(packet) + 3) + packet[14:]
    return longer + struct.pack("<I", zlib.crc32(longer[1:]))


XID = event(16, bytes(8))


def mapped(
    columns: list[tuple[str, int, bytes]] = COLUMNS, *, names: bool = True, table: bytes = b"half_message"
) -> bytes:
    meta = b"".join(c[2] for c in columns)
    body = struct.pack("<IHH", 77, 0, 1) + b"\4shop\0" + bytes((len(table),)) + table + b"\0"
    body += lenenc(len(columns)) + bytes(c[1] for c in columns) + lenenc(len(meta)) + meta
    nullable = sum(1 << n for n, column in enumerate(columns) if column[0] in NULLABLE)
    body += nullable.to_bytes((len(columns) + 7) // 8, "little")
    body += b"\1\1\0"  # which columns are unsigned: none
    texts = [c[0] for c in columns if c[1] in (STRING, VARCHAR, BLOB)]
    collations = b"".join(lenenc(COLLATIONS.get(name, DEFAULT_COLLATION)) for name in texts)
    body += b"\3" + lenenc(len(collations)) + collations
    if names:
        listed = b"".join(bytes((len(c[0]),)) + c[0].encode() for c in columns)
        body += b"\4" + lenenc(len(listed)) + listed
    return event(19, body)


def datetime6(at: datetime) -> bytes:
    packed = (((at.year * 13 + at.month) << 5 | at.day) << 17) | at.hour << 12 | at.minute << 6 | at.second
    return (packed + 0x8000000000).to_bytes(5, "big") + at.microsecond.to_bytes(3, "big")


def row(values: dict[str, Any], columns: list[tuple[str, int, bytes]] = COLUMNS) -> bytes:
    nulls, data = 0, b""
    for n, (name, kind, meta) in enumerate(columns):
        value = values.get(name)
        if value is None:
            nulls |= 1 << n
        elif kind == STRING:
            data += bytes((len(value),)) + value
        elif kind == VARCHAR:
            wide = struct.unpack("<H", meta)[0] > 255
            data += struct.pack("<H" if wide else "<B", len(value)) + value
        elif kind == BLOB:
            data += len(value).to_bytes(meta[0], "little") + value
        elif kind == DATETIME2:
            data += datetime6(value)
        else:
            data += struct.pack({LONG: "<i", LONGLONG: "<q", SHORT: "<h", FLOAT: "<f", DOUBLE: "<d"}[kind], value)
    return nulls.to_bytes((len(columns) + 7) // 8, "little") + data


AT = datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)


def values(name: str, **changed: Any) -> dict[str, Any]:
    plain = {
        "transaction_id": name.encode(), "message_no": 0, "producer_group": b"g", "mode": b"outbox",
        "state": b"COMMITTED", "shards": b"", "topic": b"t", "body": b"body", "relayed": 0, "created_at": AT,
    }  # fmt: skip
    return plain | changed


def rows(*row_images: bytes, kind: int = 30, count: int = len(COLUMNS), present: bytes | None = None) -> bytes:
    bitmap = present or b"\xff" * ((count + 7) // 8)  # MySQL sets the bits behind the last column, too
    images = bitmap * (2 if kind == 31 else 1)
    return event(kind, struct.pack("<IHHH", 77, 0, 0, 2) + lenenc(count) + images + b"".join(row_images))


def read(packets: list[bytes | None], position: str = f"{SERVER}:1-9") -> list[PackedBridgeBatch]:
    """The batches that a reader makes of the packets of a MySQL 8."""
    return [batch for batch, _ in Assembly("shop", Position(position), mariadb=False).batches([*packets, None])]


def gtids_of(batch: PackedBridgeBatch) -> str:
    position = Position.of(batch.position)
    assert position is not None
    return position.gtids


def megabyte() -> str:
    """A set of 70,000 intervals of 300 servers: what GTIDs of many years and failovers may look like."""
    servers = [f"{n:08x}-71ca-11e1-9e33-c80aa9429562" for n in range(300)]
    return ",".join(
        server + "".join(f":{first}-{first + 3}" for first in range(100_000, 102_330, 10)) for server in servers
    )
