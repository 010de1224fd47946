"""Decompresses parts of a binlog: whole transactions of MySQL, and single events of MariaDB.

MySQL (binlog_transaction_compression): event 40 contains the events of a transaction, which have no checksums and no
positions of their own. MariaDB (log_bin_compress): events 165 to 171 have a compressed end.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

from notify.binlog_bridge.binlog.decoder import length_encoded
from notify.binlog_bridge.binlog.events import UPDATES, WITH_EXTRA
from notify.binlog_bridge.errors import Unreadable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST_EVENT_BYTES = 1 << 30
"""The largest event that is decompressed: the largest packet of either server (max_allowed_packet)."""
CHUNK_BYTES = 1 << 18
_HEADER_BYTES = 19
_COMPRESSION, _PLAIN_SIZE = 2, 3
"""Fields in the header of a compressed transaction; 0 ends the header."""
_ZSTD, _NONE = 0, 255
_DAMAGED = "its binlog is damaged; start this bridge with --backfill"


def inflated(data: bytes) -> bytes:
    """The end of an event that MariaDB compressed. Raises Unreadable.

    Its first byte has the algorithm (0: zlib) and the length of the length that follows, the highest byte first.
    """
    length = data[0] & 7
    size = int.from_bytes(data[1 : 1 + length], "big")
    if data[0] & 0x70 or size > MOST_EVENT_BYTES:
        raise Unreadable(
            f"an event is compressed in a way that this bridge does not know ({data[:9].hex()}): upgrade the bridge"
        )
    try:
        content = zlib.decompressobj().decompress(data[1 + length :], size + 1)
    except zlib.error as error:
        raise Unreadable(f"an event cannot be decompressed ({error}): {_DAMAGED}") from error
    if len(content) != size:
        raise Unreadable(f"a compressed event does not have the {size} bytes that it announces: {_DAMAGED}")
    return content


def plain_rows(kind: int, packet: bytes, end: int) -> bytes:
    """A row event of MariaDB with its rows as they were before they were compressed, without a checksum.

    `end`: where the packet's body ends. Raises Unreadable.
    """
    at = 28
    if kind in WITH_EXTRA:
        at += int.from_bytes(packet[28:30], "little")
    count, at = length_encoded(packet, at)
    at += (count + 7) // 8 * (1 + (kind in UPDATES))
    return packet[:at] + inflated(packet[at:end])


def events_in(payload: bytes, end: int) -> Iterator[bytes]:
    """The events of a transaction that MySQL compressed, as packets without checksums. Raises Unreadable.

    `payload`: the packet of event 40, whose body ends at `end`. Each event gets the payload's position, because an
    event within it has none. It is decompressed in chunks, and takes the memory of its largest event.
    """
    fields, at = _header(payload)
    plain_size = fields.get(_PLAIN_SIZE, 0)
    pending, total = bytearray(), 0
    for chunk in _decompressed(memoryview(payload)[at:end], fields.get(_COMPRESSION, _NONE)):
        total += len(chunk)
        if total > plain_size:
            break
        pending += chunk
        begin = 0
        while len(pending) - begin >= _HEADER_BYTES:
            size = int.from_bytes(pending[begin + 9 : begin + 13], "little")
            if not _HEADER_BYTES <= size <= MOST_EVENT_BYTES:
                raise Unreadable(f"a compressed transaction has an event of {size} bytes: {_DAMAGED}")
            if len(pending) - begin < size:
                break
            event = pending[begin : begin + size]
            event[13:17] = payload[14:18]
            yield b"\0" + event
            begin += size
        del pending[:begin]
    if pending or total != plain_size:
        raise Unreadable(f"a compressed transaction does not have the {plain_size} bytes that it announces: {_DAMAGED}")


def _header(payload: bytes) -> tuple[dict[int, int], int]:
    """The fields of a payload's header by number, and where the header ends."""
    fields: dict[int, int] = {}
    at = 1 + _HEADER_BYTES
    while True:
        field, at = length_encoded(payload, at)
        if not field:
            return fields, at
        size, at = length_encoded(payload, at)
        fields[field], _ = length_encoded(payload, at)
        at += size


def _decompressed(data: memoryview, algorithm: int) -> Iterator[bytes]:
    """The plain bytes in chunks."""
    chunks = (bytes(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
    if algorithm == _NONE:
        yield from chunks
        return
    if algorithm != _ZSTD:
        raise Unreadable(
            f"a transaction is compressed in a way that this bridge does not know ({algorithm}): upgrade the bridge"
        )
    frame = zstd.ZstdDecompressor()
    try:
        for chunk in chunks:
            if frame.eof:  # its end was the end of the chunk before
                frame = zstd.ZstdDecompressor()
            yield frame.decompress(chunk, CHUNK_BYTES)
            while (frame.eof and frame.unused_data) or not (frame.eof or frame.needs_input):
                rest = b""
                if frame.eof:  # another frame follows
                    rest, frame = frame.unused_data, zstd.ZstdDecompressor()
                yield frame.decompress(rest, CHUNK_BYTES)
    except zstd.ZstdError as error:
        raise Unreadable(f"a transaction cannot be decompressed ({error}): {_DAMAGED}") from error
