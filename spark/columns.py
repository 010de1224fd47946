"""Columns of a segment: their schemas, and making them of index entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from notify.spark.digest import hashes
from notify.storage.log.entry import EntryKind, due_times

ATTEMPTED = 100
"""A value of the column `kind` of acks: to be delivered again, not settled. Other values are those of SettleKind."""
COMMITTED, ROLLED_BACK = 1, 2

MESSAGES = pa.schema(
    [
        ("id", pa.binary()),
        ("no", pa.int32()),
        ("producer_group", pa.int32()),  # number of its name; 0: sent without a transaction
        ("source", pa.int64()),  # hash of the id of the half's database, see name_hash; null: unknown
        ("half_us", pa.int64()),  # when the half was stored
        ("outcome", pa.int8()),  # 1 COMMITTED, 2 ROLLED_BACK, 0 none in this segment
        ("decided_us", pa.int64()),
        ("due_us", pa.int64()),  # when a delayed message is due
        ("queued_us", pa.int64()),
        ("topic", pa.int64()),  # number of its name; the half's topic if the message is in no queue
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("key_hash", pa.int64()),
        ("size", pa.int32()),
        ("position", pa.int64()),  # of the payload in the log
        ("digest", pa.int64()),  # of the contents, as digest.hashes makes it; null: the payload is not in this segment
        ("id_hash", pa.int64()),  # of the message's id, as spark.digest.hashes makes it
        ("body_hash", pa.int64()),  # of the message's id and the contents' digest; null without a digest
        # Each group's progress with the message in this segment: bit n stands for the nth group of the segment's list.
        ("acked", pa.int64()),
        ("settled", pa.int64()),
        ("attempted", pa.int64()),
        ("acked_us", pa.int64()),
        ("last_acked_us", pa.int64()),
        ("groups", pa.int64()),  # number of that list, see list_number
    ]
)
ACKS = pa.schema(
    [
        ("id", pa.binary()),  # null if the message is in another segment
        ("no", pa.int32()),
        ("consumer_group", pa.int64()),  # hash of its name, see name_hash
        ("kind", pa.int16()),
        ("at_us", pa.int64()),
        ("queued_us", pa.int64()),
        ("topic", pa.int64()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("key_hash", pa.int64()),
        ("attempts", pa.int32()),
        ("seq", pa.int64()),  # position of the record: the order of events
        ("is_loose", pa.bool_()),  # whether the columns acked, settled, … of messages lack this row
    ]
)
CHECKS = pa.schema([("id", pa.binary()), ("answered", pa.int32()), ("parked", pa.bool_()), ("at_us", pa.int64())])
"""Answers to checks that left the transaction undecided."""
MASK_GROUPS = 62
QUEUE = pa.schema(
    [MESSAGES.field(n) for n in ("id", "no", "producer_group", "topic", "queue", "offset", "queued_us")]
    + [MESSAGES.field(n) for n in ("key_hash", "size", "position")]
)
"""The queues as the index has them: a row for each place of a message."""

_OF_RELAY = "relay-"
SOURCE = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
"""The id of a database (notify_source), as a regular expression."""
_SPARK_TYPES = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}


def source_of(name: str) -> str:
    """The id of the database that a sender names; "" for what is no such id.

    A relay by position names itself `relay-` and the id of its database; a bridge may have any name.
    """
    source = name.removeprefix(_OF_RELAY)
    return source if re.match(SOURCE, source) else ""


def name_hash(name: str) -> int:
    """The number that stands for a name, such as a database's id or a group's, in columns; 0 for ""."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True) if name else 0


def with_bits(names: Sequence[str]) -> tuple[str, ...]:
    """The groups of a segment that have a bit, in the order of their bits. Instances of a broadcast have none in an
    audit; they are the last of a segment's groups."""
    return tuple(name for name in names[:MASK_GROUPS] if "@" not in name)


def list_number(names: Sequence[str]) -> int:
    """The number that stands for a segment's list of groups in its rows."""
    return name_hash("\n".join(with_bits(names)))


def spark_schema(fields: Iterable[pa.Field]) -> str:
    """Arrow fields as a schema of Spark."""
    return ", ".join(f"{f.name} {_SPARK_TYPES.get(str(f.type), str(f.type))}" for f in fields)


def places(queued: NDArray[np.void], keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row in `queued` of each (topic << 16 | queue, offset); -1 if there is none."""
    if not len(queued) or not len(keys):
        return np.full(len(keys), -1, np.int64)
    own = queued["topic"].astype(np.int64) << 16 | queued["queue"]
    order = np.lexsort((queued["offset"], own))
    own, at = own[order], queued["offset"][order].astype(np.int64)
    starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
    counts = np.diff(np.r_[starts, len(own)])
    run = np.minimum(np.searchsorted(own[starts], keys), len(starts) - 1)
    # The offsets of a queue are contiguous except for holes; after a hole the row is before the guessed place.
    guess = starts[run] + np.clip(offsets - at[starts[run]], 0, counts[run] - 1)
    is_match = (own[guess] == keys) & (at[guess] == offsets)
    for row in np.flatnonzero(~is_match & (own[starts[run]] == keys)).tolist():
        first = int(starts[run[row]])
        place = first + int(np.searchsorted(at[first : first + int(counts[run[row]])], offsets[row]))
        if place < len(at) and own[place] == keys[row] and at[place] == offsets[row]:
            guess[row], is_match[row] = place, True
    return np.where(is_match, order[guess], -1)


def queue_of(entries: NDArray[np.void], columns: Sequence[str]) -> pa.Table:
    """Columns of QUEUE for the index entries of queues."""
    rows = entries[entries["kind"] == EntryKind.QUEUE]
    arrays = []
    for name in columns:
        if name == "id":
            arrays.append(ids_of(rows, None))
        elif name == "key_hash":
            arrays.append(pa.array(rows["key_hash"].view(np.int64)))
        else:
            column = rows[{"no": "message_no", "queued_us": "time_us"}.get(name, name)]
            arrays.append(pa.array(column).cast(QUEUE.field(name).type))
    return pa.table(arrays, schema=pa.schema([QUEUE.field(name) for name in columns]))


def messages_of(entries: NDArray[np.void]) -> pa.Table:
    """The table of messages from index entries alone, without what groups settled."""
    return message_rows(entries, *(np.zeros(len(entries), np.int64) for _ in range(2)))[0]


def message_rows(
    table: NDArray[np.void], sources: NDArray[np.int64], digests: NDArray[np.int64]
) -> tuple[pa.Table, NDArray[np.int64]]:
    """One row for each message, with its half, outcome and place if these entries have them; and each entry's row.

    For each entry, `sources` has the hash of its half's database, and `digests` that of its contents; 0: not known.

    A message that is in several queues, or twice in one, has a row for each place. A rollback whose half is in another
    segment has one row, number 0, without `half_us`.
    """
    chosen = np.flatnonzero(np.isin(table["kind"], _OF_MESSAGES))
    row_of = np.full(len(table), -1, np.int64)
    table, sources, digests = table[chosen], sources[chosen], digests[chosen]
    rank = _RANK[table["kind"]]
    order = np.lexsort((rank, table["message_no"], table["id_low"], table["id_high"]))
    table, sources, digests = table[order], sources[order], digests[order]
    new_id = np.ones(len(table), bool)
    new_id[1:] = (table["id_high"][1:] != table["id_high"][:-1]) | (table["id_low"][1:] != table["id_low"][:-1])
    new = new_id.copy()
    new[1:] |= table["message_no"][1:] != table["message_no"][:-1]
    kind = table["kind"]
    queued = kind == EntryKind.QUEUE
    # A message's second place is a row of its own.
    new[1:] |= queued[1:] & queued[:-1]
    row = np.cumsum(new) - 1
    row_of[chosen[order]] = row
    first = np.flatnonzero(new)
    own = {"source": sources[first], "digest": digests[first]}
    return _message_table(table, own, row, np.cumsum(new_id) - 1, first), row_of


def _message_table(
    table: NDArray[np.void],
    own: Mapping[str, NDArray[np.int64]],
    row: NDArray[np.int64],
    transaction: NDArray[np.int64],
    first: NDArray[np.int64],
) -> pa.Table:
    """MESSAGES of sorted entries: `row` and `transaction` number each entry's, `first` is each row's first entry, and
    `own` has columns with a value for each row, 0 for none."""
    rows = len(first)
    kind = table["kind"]
    base = table[first]
    half = kind == EntryKind.HALF
    queued = kind == EntryKind.QUEUE
    delayed = kind == EntryKind.DELAYED
    rolled = kind == EntryKind.ROLLBACK
    transactions = int(transaction[-1]) + 1 if len(transaction) else 0
    rolled_us, not_rolled = _spread(transactions, transaction[rolled], table["time_us"][rolled])

    def column(mask: NDArray[np.bool_], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return _spread(rows, row[mask], values[mask])

    half_us, no_half = column(half, table["time_us"])
    queued_us, no_queue = column(queued, table["time_us"])
    offset, _ = column(queued, table["offset"])
    due_us, not_delayed = column(delayed, due_times(table))
    committed_us, not_committed = column(delayed | queued, table["time_us"])
    delayed_us, _ = column(delayed, table["time_us"])
    committed_us = np.where(not_delayed, committed_us, delayed_us)
    has_rolled_back = ~not_rolled[transaction[first]] & not_committed
    decided_us = np.where(has_rolled_back, rolled_us[transaction[first]], committed_us)
    outcome = np.where(has_rolled_back, ROLLED_BACK, np.where(not_committed, 0, COMMITTED)).astype(np.int8)
    return pa.table(
        [
            ids_of(base, None),
            pa.array(base["message_no"].astype(np.int32)),
            pa.array(base["producer_group"].astype(np.int32)),
            pa.array(own["source"], mask=own["source"] == 0),
            pa.array(half_us, mask=no_half),
            pa.array(outcome),
            pa.array(decided_us, mask=outcome == 0),
            pa.array(due_us, mask=not_delayed),
            pa.array(queued_us, mask=no_queue),
            pa.array(base["topic"].astype(np.int64)),
            pa.array(base["queue"].astype(np.int32)),
            pa.array(offset, mask=no_queue),
            pa.array(base["key_hash"].view(np.int64)),
            pa.array(base["size"].astype(np.int32)),
            pa.array(base["position"].astype(np.int64)),
            pa.array(own["digest"], mask=own["digest"] == 0),
            *_hashes(base, own["digest"]),
            *[pa.nulls(rows, pa.int64()) for _ in range(6)],
        ],
        schema=MESSAGES,
    )


def _hashes(rows: NDArray[np.void], digests: NDArray[np.int64]) -> tuple[pa.Array, pa.Array]:
    """The columns `id_hash` and `body_hash`."""
    high, low, numbers = rows["id_high"], rows["id_low"], rows["message_no"].astype(np.int64)
    known = digests != 0
    of_bodies = np.zeros(len(rows), np.int64)
    of_bodies[known] = hashes.of_bodies(high[known], low[known], numbers[known], digests[known])
    return pa.array(hashes.of_messages(high, low, numbers)), pa.array(of_bodies, mask=~known)


def _spread(size: int, at: NDArray[np.int64], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A column of `size` with these values at these rows, and which of its rows have none."""
    column = np.zeros(size, np.int64)
    is_missing = np.ones(size, bool)
    column[at] = values
    is_missing[at] = False
    return column, is_missing


_OF_MESSAGES = [int(k) for k in (EntryKind.HALF, EntryKind.QUEUE, EntryKind.ROLLBACK, EntryKind.DELAYED)]
_RANK = np.zeros(256, np.uint8)
_RANK[[EntryKind.DELAYED, EntryKind.ROLLBACK, EntryKind.QUEUE]] = [1, 2, 3]


def ids_of(rows: NDArray[np.void], missing: NDArray[np.bool_] | None) -> pa.Array:
    """Transaction ids as binary values of 16 bytes, made without a Python object for each."""
    data = np.empty((len(rows), 2), ">u8")
    data[:, 0], data[:, 1] = rows["id_high"], rows["id_low"]
    ends = pa.py_buffer(np.arange(0, 16 * len(rows) + 1, 16, dtype=np.int32))
    valid = None
    if missing is not None:
        valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(rows), [valid, ends, pa.py_buffer(data)])
