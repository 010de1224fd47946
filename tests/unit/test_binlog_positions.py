"""Positions in a binlog: sets of GTIDs, their bytes as a MySQL 9.7 wrote them, and places in large files."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.binlog.position import MariaDbSet, MySqlSet, Position, reaches, tagged_gtid
from notify.binlog_bridge.binlog.reader import Assembly
from notify.binlog_bridge.binlog.stream import BinlogStream
from notify.errors import InvalidRequest, Unavailable
from tests.support.binlog import SERVER, XID, event, gtid, megabyte, query

UUID = "2ad27fb7-eb26-11f1-9204-02fc00000001"
TAGGED_SET = f"{UUID}:1-3:abcdefghijklmnopqrstuvwxyz_12345:1:blue:1-2,{SERVER}:red:123456789012345"
# The bytes that the server sent for the set above, and for two of its transactions, without checksums.
PREVIOUS_GTIDS = """
0104000000000001 2ad27fb7eb2611f1920402fc00000001 00 0100000000000000 0100000000000000 0400000000000000
2ad27fb7eb2611f1920402fc00000001 40 6162636465666768696a6b6c6d6e6f707172737475767778797a5f3132333435
0100000000000000 0100000000000000 0200000000000000 2ad27fb7eb2611f1920402fc00000001 08 626c7565
0100000000000000 0100000000000000 0300000000000000 3e11fa4771ca11e19e33c80aa9429562 06 726564
0100000000000000 79df0d8648700000 7adf0d8648700000
"""
SECOND_BLUE = """
02 70 00 00 00 02 544903fedd02ad034c22c50349020804f10300000002 0408 0608 626c7565
08080a140c7f6a52ff435561061075041283120b
"""
ONE_RED = """
02 7c 00 00 00 02 7c22e9038ee22903228503790266210314a502845502 c404 3f79df0d864870 0606 726564
08080a1c0c7fd57bff43556106108d041283120b
"""


def test_gtid_sets() -> None:
    parsed = MySqlSet.parse(f"{SERVER}:1-5:8-10,\n{SERVER.hex[:8]}-71ca-11e1-9e33-c80aa9429563:7")
    parsed.add(str(SERVER), 6)
    parsed.add(str(SERVER), 7)
    assert str(parsed).split(",")[0] == f"{SERVER}:1-10"
    parsed.add(str(SERVER), 12)
    assert str(parsed).split(",")[0] == f"{SERVER}:1-10:12"
    domains = MariaDbSet.parse("0-1-5, 1-2-7")
    domains.add(0, 3, 6)
    assert str(domains) == "0-3-6,1-2-7"
    for kind, text in ((MySqlSet, "0-1-5"), (MariaDbSet, f"{SERVER}:1")):
        with pytest.raises(InvalidRequest):
            kind.parse(text)
    assert Position.of(Position("0-1-2", "bin.1", 7).text) == Position("0-1-2", "bin.1", 7)
    for foreign in (
        '["half_message", []]',
        "0/16B3748",
        "{",
        '{"gtids": "0-1-2"}',
        '{"gtids": "", "file": "", "offset": "x"}',
    ):
        with pytest.raises(InvalidRequest, match="another kind"):
            Position.of(foreign)


def test_a_set_of_a_megabyte_is_read_and_extended_in_linear_time() -> None:
    """Each interval was sorted in among all others: 8,000 took half a minute."""
    text = megabyte()
    began = time.process_time()
    gtids = MySqlSet.parse(text)
    assert str(gtids) == text and gtids.has(text) and str(MySqlSet.decode(gtids.encode())) == text
    server = text[:36]
    for number in range(200_000, 200_500):
        gtids.add(server, number)
        assert len(str(gtids)) > len(text)
    took = time.process_time() - began
    assert len(text) > 950_000 and took < 10  # half a minute for a ninth of it; 1.5 s here
    assert f":102320-102323:200000-200499,{1:08x}" in str(gtids)


@pytest.mark.long
def test_a_set_is_written_as_it_is_whatever_is_added_to_it() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        gtids, model = MySqlSet(), set()
        for _ in range(300):
            number = chance.randrange(1, 2000)
            gtids.add(UUID, number)
            model.add(number)
            if chance.random() < 0.3:
                words = [word.partition("-") for word in str(gtids).split(":")[1:]]
                assert {n for first, _, last in words for n in range(int(first), int(last or first) + 1)} == model
                assert str(MySqlSet.parse(str(gtids))) == str(gtids)


def test_tags_in_sets() -> None:
    gtids = MySqlSet.parse(TAGGED_SET.replace(",", ",\n").replace("blue", "Blue"))
    assert str(gtids) == TAGGED_SET
    assert gtids.has(f"{UUID}:2-3:blue:1") and not gtids.has(f"{UUID}:blue:3") and not gtids.has(f"{UUID}:red:1")
    gtids.add(f"{UUID}:blue", 3)
    gtids.add(UUID, 5)
    gtids.add(f"{SERVER}:new", 1)
    assert str(gtids) == (
        f"{UUID}:1-3:5:abcdefghijklmnopqrstuvwxyz_12345:1:blue:1-3,{SERVER}:new:1:red:123456789012345"
    )
    assert str(MySqlSet.parse(f"{SERVER}:blue:2,{SERVER}:7:blue:1")) == f"{SERVER}:7:blue:1-2"
    for wrong in (f"{UUID}", f"{UUID}:", f"{UUID}:blue", f"{UUID}:1-", f"{UUID}:5-3", f"{UUID}:0", f"{UUID}:1:9x:1"):
        with pytest.raises(InvalidRequest):
            MySqlSet.parse(wrong)


def test_a_set_with_tags_in_bytes() -> None:
    assert str(MySqlSet.decode(bytes.fromhex(PREVIOUS_GTIDS))) == TAGGED_SET
    # A server that had tags before writes an empty set so.
    assert str(MySqlSet.decode(bytes.fromhex("0100000000000001"))) == str(MySqlSet.decode(bytes(8))) == ""
    assert MySqlSet.parse(TAGGED_SET).encode() == bytes.fromhex(PREVIOUS_GTIDS)
    plain = struct.pack("<Q", 1) + SERVER.bytes + struct.pack("<Qqqqq", 2, 1, 6, 8, 9)
    assert MySqlSet.parse(f"{SERVER}:1-5:8").encode() == plain
    assert str(MySqlSet.decode(plain + b"and a checksum")) == f"{SERVER}:1-5:8"


def test_tagged_transactions_move_the_position() -> None:
    assert tagged_gtid(bytes.fromhex(SECOND_BLUE)) == (f"{UUID}:blue", 2)
    assert tagged_gtid(bytes.fromhex(ONE_RED)) == (f"{SERVER}:red", 123456789012345)
    tagged = [event(42, bytes.fromhex(body)) for body in (SECOND_BLUE, ONE_RED)]
    packets = [part for begin in (gtid(6), *tagged) for part in (begin, query(b"BEGIN"), XID)]
    (batch,) = (b for b, _ in Assembly("shop", Position(f"{SERVER}:1-5"), mariadb=False).batches([*packets, None]))
    position = Position.of(batch.position)
    assert position is not None and position.gtids == f"{UUID}:blue:2,{SERVER}:1-6:red:123456789012345"
    assert reaches(position.gtids, f"{SERVER}:red:123456789012345") and not reaches(position.gtids, f"{UUID}:blue:1-2")


def ends_at(packet: bytes, place: int) -> bytes:
    """An event that says it ends at a place in its file: in 32 bits, whatever the place."""
    return packet[:14] + struct.pack("<I", place & 0xFFFFFFFF) + packet[18:]


def test_a_file_above_4_gib() -> None:
    """No transaction is split, so a file may have any size; the ends of events wrapped, and so did the position."""
    assembly = Assembly("shop", Position(f"{SERVER}:1-9", "bin.000004", 3_000_000_000, 0, 1), mariadb=False)
    described = event(15, bytes(80) + b"\0" + bytes(4))
    packets: list[bytes | None] = [event(4, struct.pack("<Q", 4) + b"bin.000004"), described, None]
    gib = 1 << 30
    packets += [ends_at(gtid(10), 3_000_000_100), ends_at(query(b"BEGIN"), 3_000_000_200), None]
    # A large transaction of tables that are not ours.
    for place in range(4 * gib, 11 * gib, gib):
        packets += [ends_at(event(29, b"\0"), place), None]
    packets += [ends_at(XID, 11 * gib), None]
    packets += [ends_at(gtid(11), 11 * gib + 50), query(b"BEGIN"), ends_at(XID, 11 * gib + 99), None]
    offsets = [p.offset for b, _ in assembly.batches(packets) if (p := Position.of(b.position)) is not None]
    assert offsets == [11 * gib, 11 * gib + 99]
    # The next file begins, also where its name comes with a place beyond 4 GiB.
    packets = [event(4, struct.pack("<Q", 5 * gib) + b"bin.000005"), described]
    packets += [ends_at(gtid(12), 5 * gib + 50), query(b"BEGIN"), ends_at(XID, 5 * gib + 99), None]
    (last,) = (Position.of(b.position) for b, _ in assembly.batches(packets))
    assert last is not None and (last.file, last.offset) == ("bin.000005", 5 * gib + 99)


@pytest.fixture
def stream_and_source() -> Iterator[tuple[BinlogStream, socket.socket]]:
    """A stream whose source is the other end of a pair of sockets."""
    ours, theirs = socket.socketpair()
    stream = BinlogStream(sa.make_url("mysql+pymysql://x@127.0.0.1:1/shop"), 7, None, mariadb=False)
    stream._socket = ours
    with ours, theirs:
        yield stream, theirs


def sent(payload: bytes) -> bytes:
    """A payload in packets: one of 16 MiB - 1 is followed by another, which may be empty."""
    parts = [payload[at : at + 0xFFFFFF] for at in range(0, len(payload) + 1, 0xFFFFFF)]
    return b"".join(len(part).to_bytes(3, "little") + bytes((n & 0xFF,)) + part for n, part in enumerate(parts))


@pytest.mark.parametrize(
    "size",
    [2, 0xFFFFFE, 0xFFFFFF, 0x1000000, 2 * 0xFFFFFF, pytest.param(3 * 0xFFFFFF + 5, marks=pytest.mark.long)],
)
def test_an_event_of_any_size(stream_and_source: tuple[BinlogStream, socket.socket], size: int) -> None:
    stream, source = stream_and_source
    large, small = b"\0" + random.Random(size).randbytes(size - 1), b"\0small"

    def send() -> None:
        source.sendall(sent(large) + sent(small))
        source.close()

    thread = threading.Thread(target=send)
    thread.start()
    packets = (packet for packet in stream.packets() if packet is not None)
    first, second = zlib.crc32(next(packets)), next(packets)
    with pytest.raises(Unavailable, match="closed the connection"):
        next(packets)
    thread.join()
    assert (first, second) == (zlib.crc32(large), small)


def test_a_source_that_refuses_in_the_middle_of_its_stream(
    stream_and_source: tuple[BinlogStream, socket.socket],
) -> None:
    stream, source = stream_and_source
    source.sendall(sent(b"\0an event") + sent(b"\xff" + struct.pack("<H", 1053) + b"#08S01Server shutdown in progress"))
    source.close()
    packets = stream.packets()
    assert next(packets) == b"\0an event"
    with pytest.raises(Unavailable, match=r"the source refuses: Server shutdown in progress \(1053\)"):
        list(packets)
    with pytest.raises(Unavailable, match="closed the connection"):
        list(stream.packets())


def test_a_source_may_be_silent_while_it_looks_for_the_position() -> None:
    """A MariaDB reads its file up to the position (MDEV-4991): after 10 s the bridge connected again, without end."""
    ours, theirs = socket.socketpair()
    url = sa.make_url("mysql+pymysql://x@127.0.0.1:1/shop")
    stream = BinlogStream(url, 7, None, mariadb=True, silent_seconds=0.1, search_seconds=60)
    stream._socket = ours
    begin = [event(4, struct.pack("<Q", 4) + b"bin.000001"), event(15, bytes(60)), event(163, bytes(4))]
    with ours, theirs:
        packets = (packet for packet in stream.packets() if packet is not None)
        theirs.sendall(b"".join(map(sent, begin)))
        assert [next(packets) for _ in begin] == begin
        # Several times as long as it may be silent later.
        found = threading.Timer(0.5, theirs.sendall, [sent(gtid(10))])
        found.start()
        assert next(packets) == gtid(10)
        found.join()
        with pytest.raises(Unavailable, match=r"silent for 0\.1 s"):
            next(packets)
