"""Recorded binlogs of real servers (tests/support/record_binlog.py), read without a server."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from backports import zstd

from notify.binlog_bridge.binlog import compressed, decoder, events
from notify.binlog_bridge.binlog.compressed import events_in
from notify.binlog_bridge.binlog.decoder import DIFFERENCES, length_encoded
from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.reader import Assembly
from notify.binlog_bridge.errors import Unreadable
from notify.protocol.wire import BridgedTransaction
from tests.support import binlog
from tests.support.binlog import lenenc, summed
from tests.support.record_binlog import SERVERS, id_of, recorded, scenarios


def read(server: str, packets: list[bytes]) -> tuple[list[BridgedTransaction], Position]:
    """The transactions of a stream, and the position after it."""
    assembly = Assembly("shop", None, mariadb=server == "mariadb")
    batches = [batch for batch, _ in assembly.batches([*packets, None])]
    position = Position.of(batches[-1].position)
    assert position is not None
    return [t for batch in batches for t in batch.transactions], position


def ids_of(transactions: list[BridgedTransaction]) -> list[int]:
    return [int(t.id[-12:]) for t in transactions for _ in t.messages]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("scenario", ["rows", "compressed"])
def test_messages_and_position_of_a_stream(server: str, scenario: str) -> None:
    packets = recorded(server, scenario)
    transactions, position = read(server, packets)
    assert ids_of(transactions) == [1, 1, 3, 5, 6, 8]
    for transaction in (transactions[0], transactions[1]):
        m = transaction.messages[0]
        assert (m.topic, m.body, m.key, m.tag, m.headers) == ("t", b"\0\xff" * 200, "kö", "x", {"h": "v"})
        assert (m.delay, m.deliver_at, m.ttl) == (1.5, datetime(2027, 1, 1, 12, 30, tzinfo=UTC), 60.0)
    last = [p for p in packets if p[5] in (events.XID, events.PAYLOAD, events.QUERY)][-1]
    assert position.offset == int.from_bytes(last[14:18], "little")
    assert position.newest_us == int.from_bytes(last[1:5], "little") * 1_000_000


def kinds(packets: list[bytes]) -> set[int]:
    return {packet[5] for packet in packets}


def test_the_compressed_streams_are_compressed() -> None:
    assert events.PAYLOAD in kinds(recorded("mysql", "compressed"))
    assert {166, 167, events.QUERY_COMPRESSED} <= kinds(recorded("mariadb", "compressed"))


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("scenario", ["minimal", "noblob"])
def test_rows_without_columns_that_had_no_value_are_read(server: str, scenario: str) -> None:
    """Inserted rows have NULL there; and an update that is no message needs none of them."""
    transactions, _ = read(server, recorded(server, scenario))
    assert ids_of(transactions) == [1, 2, 3, 4]
    assert [t.messages[0].body for t in transactions] == [b"\0\xff" * 200, b"", b"", b"\0\xff" * 200]
    assert [t.messages[0].key for t in transactions] == ["kö", "kö", None, "kö"]


@pytest.mark.parametrize("server", SERVERS)
def test_a_decision_without_its_message_stops_it(server: str) -> None:
    with pytest.raises(Unreadable, match=r"server_half_message was logged without body, headers: .*row_image = FULL"):
        read(server, recorded(server, "undecidable"))


@pytest.mark.parametrize("server", SERVERS)
def test_tables_with_columns_of_every_type_are_passed(server: str) -> None:
    transactions, _ = read(server, recorded(server, "types"))
    assert ids_of(transactions) == [1]


def test_parts_of_json_values_are_passed_and_skipped() -> None:
    packets = recorded("mysql", "json")
    assert sum(packet[5] == events.PARTIAL_UPDATE for packet in packets) == 2
    transactions, _ = read("mysql", packets)
    assert ids_of(transactions) == [1, 2] and transactions[1].messages[0].body == b'{"n": 2}'


def payload(stated: int, algorithm: int, content: bytes) -> bytes:
    """A compressed transaction, as MySQL writes it."""
    fields = [
        (2, bytes((algorithm,)) if algorithm < 251 else lenenc(algorithm)),
        (3, lenenc(stated)),
        (1, lenenc(len(content))),
    ]
    header = b"".join(bytes((n, len(value))) + value for n, value in fields) + b"\0"
    first = next(p for p in recorded("mysql", "compressed") if p[5] == events.PAYLOAD)
    return summed(first[:20] + header + content)


def plain_of(packet: bytes) -> bytes:
    """The events in a compressed transaction."""
    return zstd.decompress(packet[packet.index(b"\x28\xb5\x2f\xfd") : -4])


def with_payload(make: Callable[[bytes], bytes]) -> list[bytes]:
    """The compressed stream up to its first transaction, whose events are packed in another way."""
    packets = recorded("mysql", "compressed")
    n = next(n for n, p in enumerate(packets) if p[5] == events.PAYLOAD)
    return [*packets[:n], make(plain_of(packets[n]))]


@pytest.mark.parametrize(
    "make",
    [
        lambda plain: payload(len(plain), 255, plain),
        lambda plain: payload(len(plain), 0, zstd.compress(plain[:700]) + zstd.compress(plain[700:])),
    ],
    ids=["not compressed", "several frames"],
)
def test_other_ways_to_pack_a_transaction(make: Callable[[bytes], bytes]) -> None:
    transactions, _ = read("mysql", with_payload(make))
    assert ids_of(transactions) == [1, 1]


def test_a_frame_may_end_with_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(plain: bytes) -> bytes:
        frame = zstd.compress(plain[:700])
        monkeypatch.setattr(compressed, "CHUNK_BYTES", len(frame))
        return payload(len(plain), 0, frame + zstd.compress(plain[700:]))

    transactions, _ = read("mysql", with_payload(make))
    assert ids_of(transactions) == [1, 1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda plain: payload(len(plain), 7, plain), "does not know"),
        (lambda plain: payload(len(plain) - 1, 0, zstd.compress(plain)), "bytes that it announces"),
        (lambda plain: payload(len(plain) + 1, 0, zstd.compress(plain)), "bytes that it announces"),
        (lambda plain: payload(len(plain), 0, zstd.compress(plain)[:-9]), "bytes that it announces"),
        (lambda plain: payload(len(plain) - 5, 0, zstd.compress(plain[:-5])), "bytes that it announces"),
        (lambda plain: payload(len(plain), 0, b"no zstd"), "cannot be decompressed"),
        (lambda plain: payload(40, 255, plain[:9] + b"\2\0\0\0" + plain[13:40]), "an event of 2 bytes"),
        (lambda plain: payload(40, 255, plain[:9] + b"\xff" * 4 + plain[13:40]), "an event of 4294967295 bytes"),
    ],
    ids=["algorithm", "longer", "shorter", "cut", "half an event", "damaged", "tiny event", "huge event"],
)
def test_a_transaction_that_is_packed_wrongly_stops_it(make: Callable[[bytes], bytes], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read("mysql", with_payload(make))


def test_a_payload_is_decompressed_in_chunks() -> None:
    """A transaction of 200 MB that compresses well takes no more memory than its largest event."""
    event = plain_of(next(p for p in recorded("mysql", "compressed") if p[5] == events.PAYLOAD))
    size = int.from_bytes(event[9:13], "little")
    one = event[:9] + (1 << 20).to_bytes(4, "little") + event[13:size] + bytes((1 << 20) - size)
    compressor = zstd.ZstdCompressor()
    content = b"".join(compressor.compress(one) for _ in range(200)) + compressor.flush()
    packed = payload(200 << 20, 0, content)
    tracemalloc.start()
    assert sum(len(event) - 1 for event in events_in(packed, len(packed) - 4)) == 200 << 20
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (b"\x90", "does not know"),
        (b"\x82\x00\x05", "bytes that it announces"),
        (b"\x87" + b"\xff" * 7, "does not know"),
    ],
)
def test_compressed_rows_that_are_damaged_stop_it(damaged: bytes, why: str) -> None:
    packets = recorded("mariadb", "compressed")
    n = packets.index(first(packets, 166, table=b"half_message"))
    packed = packets[n].index(b"\x78\x9c") - 3  # before the length, which has two bytes
    packets[n] = summed(packets[n][:packed] + damaged + packets[n][packed + len(damaged) : -4])
    with pytest.raises(Unreadable, match=why):
        read("mariadb", packets)


# --- what the two encode differently ------------------------------------------------------------------------------


def first(packets: list[bytes], *kinds: int, table: bytes = b"") -> bytes:
    """The first event of these types; with `table` it is that table's map, or follows it."""
    is_ours = not table
    for packet in packets:
        if packet[5] == events.TABLE_MAP and table:
            is_ours = b"\0" + bytes((len(table),)) + table + b"\0" in packet
        if packet[5] in kinds and is_ours:
            return packet
    raise AssertionError(f"no event of {kinds}")


def bitmaps(packet: bytes) -> tuple[int, int, int, int]:
    """The first row of an event: the number of columns, logged columns, and bits of NULL; how many are logged."""
    at = 28 + (int.from_bytes(packet[28:30], "little") if packet[5] in events.WITH_EXTRA else 0)
    count, at = length_encoded(packet, at)
    size = (count + 7) // 8
    logged = int.from_bytes(packet[at : at + size], "little")
    number = (logged & ((1 << count) - 1)).bit_count()
    nulls = int.from_bytes(packet[at + size : at + size + (number + 7) // 8], "little")
    return count, logged, nulls, number


def types_of(server: str, column: str) -> int:
    body = next(p for p in recorded(server, "types") if p[5] == events.TABLE_MAP)[20:-4]
    return decoder.column(decoder.table_map(body), column).type


def has(server: str, *wanted: int) -> bool:
    seen = set().union(*(kinds(recorded(server, scenario)) for scenario in scenarios(server)))
    return all(kind in seen for kind in wanted)


def row_of(server: str, scenario: str) -> tuple[int, int, int, int]:
    return bitmaps(first(recorded(server, scenario), 23, 30, table=b"half_message"))


SHOWN: dict[str, tuple[Callable[[], bool], Callable[[], bool]]] = {
    "GTID": (lambda: has("mysql", 33), lambda: has("mariadb", 162) and not has("mariadb", 33)),
    "GTIDs before a file": (lambda: has("mysql", 35), lambda: has("mariadb", 163)),
    "row events": (
        lambda: first(recorded("mysql", "rows"), 30)[28:30] == b"\2\0" and not has("mysql", 23),
        lambda: has("mariadb", 23, 24) and not has("mariadb", 30),
    ),
    "bits after the last column, all columns present": (
        lambda: row_of("mysql", "rows")[1] == (1 << 24) - 1,
        lambda: row_of("mariadb", "rows")[1] == (1 << 17) - 1,
    ),
    "bits after the last column, some columns present": (
        lambda: row_of("mysql", "minimal")[1] >> 17 == 0,
        lambda: row_of("mariadb", "minimal")[1] >> 17 == 0,
    ),
    "bits of NULL after the last column": (
        lambda: row_of("mysql", "rows")[2] >> 17 == 0,
        lambda: row_of("mariadb", "rows")[2] >> 17 == (1 << 7) - 1,
    ),
    "BEGIN": (
        lambda: any(p[5] == 2 and b"BEGIN" in p for p in recorded("mysql", "rows")),
        lambda: not any(p[5] == 2 and b"BEGIN" in p for p in recorded("mariadb", "rows")),
    ),
    "a whole transaction compressed": (lambda: has("mysql", 40), lambda: not has("mariadb", 40)),
    "an event compressed": (lambda: not has("mysql", 166), lambda: has("mariadb", 165, 166, 167)),
    "parts of JSON values": (lambda: has("mysql", 39), lambda: not has("mariadb", 39)),
    "JSON": (lambda: types_of("mysql", "c_json") == 245, lambda: types_of("mariadb", "c_json") == 252),
    "VECTOR": (lambda: types_of("mysql", "c_vector") == 242, lambda: True),
    "a heartbeat": (lambda: has("mysql", 27) or has("mysql", 41), lambda: has("mariadb", 27)),
    "a compressed column": (
        lambda: True,
        lambda: (types_of("mariadb", "c_packed_blob"), types_of("mariadb", "c_packed_varchar")) == (140, 141),
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.what)
def test_the_table_of_differences_is_what_the_servers_wrote(difference: object) -> None:
    on_mysql, on_mariadb = SHOWN[difference.what]
    assert on_mysql() and on_mariadb()


def test_streams_made_by_hand_have_the_form_of_recorded_ones() -> None:
    packets = recorded("mysql", "rows")
    made, real = binlog.mapped(), first(packets, events.TABLE_MAP, table=b"half_message")
    assert decoder.table_map(made[20:]).columns == decoder.table_map(real[20:-4]).columns
    assert len(binlog.gtid(1)) == len(first(packets, events.MYSQL_GTID)) - 4
    assert len(binlog.query(b"BEGIN")) == len(first(packets, events.QUERY)) - 4
    assert len(binlog.XID) == len(first(packets, events.XID)) - 4
    rows = binlog.rows(binlog.row(binlog.values(id_of(1))))
    assert rows[28:32] == first(packets, events.WRITE, table=b"half_message")[28:32] and rows[28:30] == b"\2\0"
    assert bitmaps(rows)[:2] == row_of("mysql", "rows")[:2]


def test_the_recordings_are_those_of_the_scenarios() -> None:
    for server in SERVERS:
        for scenario in scenarios(server):
            packets = recorded(server, scenario)
            version = re.search(rb"\x04\x00(\d+\.\d+)", first(packets, events.FORMAT))
            assert version is not None and version[1] == {"mysql": b"9.7", "mariadb": b"10.11"}[server]
    assert id_of(1) == "00000000-0000-7000-8000-000000000001"
