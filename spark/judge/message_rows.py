"""One row for each message, with the facts of every input, made by one aggregation.

Every table is converted to rows of a common shape, in which most columns are null. Their union is grouped by message
once; five full outer joins would sort everything four more times. Facts about consumer groups are bits of a mask: bit n
belongs to the nth group, so that "subscribed and not settled" is arithmetic for any number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.runtime.databases import DROPPED, REFUSED, UNSENT
from notify.spark.inputs.columns import ATTEMPTED, COMMITTED, ROLLED_BACK, name_hash
from notify.spark.small_table import small_table

BITS = 62
UNKNOWN, OUTBOX, UNMOVED, DATABASE = 3, 4, 8, 32
"""Parts of `t_state` apart from COMMITTED and ROLLED_BACK."""
ABROAD = -1
"""The `origin` of halves from a database that was not given, or whose transactions are in no database."""
HALF_WAITS, HALF_DROPPED = 4, 8
MARKS = 16
"""By which the column `withdrawn` of a log is multiplied, to be a part of `outcomes`."""
"""Parts of `outcomes` for a committed half in a storage: no bridge or relay has sent it on, or a person dropped it."""
_PLACE_TOPIC, _PLACE_LOG = 16, 48

# Column: (type, aggregate over the rows of one message).
_SHAPE: dict[str, tuple[str, str]] = {
    "t_us": ("bigint", "min"),  # when the local row was written
    "t_state": (
        "int",
        "min",
    ),  # 1 COMMITTED, 2 ROLLED_BACK (a tombstone) or 3 unknown, + 4 for mode outbox, + 8 * unmoved (see
    # spark.checks.outbox_waiting), + 32 * number of the database
    "topic": ("bigint", "max"),  # hash of its name
    "producer_group": ("bigint", "max"),  # hash of its name; null: sent without a transaction
    "origin": ("int", "max"),  # number of the database that the half came from; ABROAD, or null: not known
    "digest": ("bigint", "max"),  # of the contents: body, key and tag
    "half_us": ("bigint", "min"),
    "outcomes": ("int", "or"),  # 1 COMMITTED, 2 ROLLED_BACK, 3 both, + HALF_WAITS or HALF_DROPPED, + MARKS
    "due_us": ("bigint", "max"),
    "queued_us": ("bigint", "min"),
    "place": ("bigint", "min"),  # log, topic and queue
    "offset": ("bigint", "min"),
    "places": ("bigint", "count"),
    "acked_us": ("bigint", "min"),
    "last_acked_us": ("bigint", "max"),
    "effect_us": ("bigint", "min"),
    "inbox_rows": ("bigint", "count"),  # without those of replays
}
MASKS = ("acked", "settled", "attempted", "effects")
PROVEN = "proven"
"""The mask of the groups in which a query of --effects found the effect; it is there only where one was given."""


class Groups:
    """Consumer groups, and the bit of each group in the masks."""

    def __init__(self, names: Sequence[str], masks: Sequence[str] = MASKS) -> None:
        """`masks`: the kinds of masks that a message's row has."""
        self.names = list(dict.fromkeys(names))
        self.masks = tuple(masks)
        self.blocks = max(1, -(-len(self.names) // BITS))
        self._number = {name: number for number, name in enumerate(self.names)}

    def bit(self, name: str, block: int) -> int:
        """The group's bit in this block of the mask; 0 if its bit is in another block, or it has no bit."""
        number = self._number.get(name, -1)
        return 1 << number % BITS if number // BITS == block else 0

    def mask(self, names: Sequence[str], block: int) -> int:
        return reduce(lambda mask, name: mask | self.bit(name, block), names, 0)

    def of(self, masks: Sequence[int | None]) -> list[str]:
        """The names of the groups whose bits are set; `masks` has a mask for each block."""
        return [name for name in self.names if any((masks[b] or 0) & self.bit(name, b) for b in range(self.blocks))]

    def table(self, spark: SparkSession) -> DataFrame:
        """(group, consumer_group, bit0, bit1, …); `consumer_group` is the hash of the name, which acks have."""
        columns = {"group": pa.string(), "consumer_group": pa.int64()}
        columns |= {f"bit{b}": pa.int64() for b in range(self.blocks)}
        rows = [(name, name_hash(name), *[self.bit(name, b) for b in range(self.blocks)]) for name in self.names]
        return small_table(spark, columns, rows)


def bits(mask: Column) -> Column:
    """The mask; 0, no group, if it is null."""
    return F.coalesce(mask, F.lit(0).cast("bigint"))


def mask(name: str, block: int) -> Column:
    """A block of a mask of a message's row, such as `acked`."""
    return bits(F.col(f"{name}{block}"))


def took_effect(groups: Groups, block: int) -> Column:
    """The groups of a block in which the message took effect, by their inboxes or by --effects."""
    return mask("effects", block).bitwiseOR(mask(PROVEN, block)) if PROVEN in groups.masks else mask("effects", block)


def without(name: str, other: str, block: int) -> Column:
    """The groups of a block that are in one mask and not in the other."""
    return mask(name, block).bitwiseAND(F.bitwise_not(mask(other, block)))


def columns(groups: Groups) -> list[str]:
    return [*_SHAPE, *[f"{mask}{b}" for mask in groups.masks for b in range(groups.blocks)]]


def shaped(rows: DataFrame, groups: Groups, **values: Column | str) -> DataFrame:
    """Rows of one input in the common shape; columns that are not in `values` are null."""
    selected: list[Column] = [F.col("id"), F.col("no")]
    for name in columns(groups):
        kind = _SHAPE[name][0] if name in _SHAPE else "bigint"
        value = values.get(name)
        if value is None:
            selected.append(F.expr(f"CAST(NULL AS {kind}) AS {name}"))
        else:
            selected.append((F.col(value) if isinstance(value, str) else value).cast(kind).alias(name))
    return rows.select(*selected)


def of_local_rows(rows: DataFrame, number: int, groups: Groups) -> DataFrame:
    """Table T, from spark.databases.Database.local_rows."""
    return shaped(
        rows,
        groups,
        t_us="at_us",
        t_state=F.col("state") + F.lit(number * DATABASE) + F.col("is_outbox") * OUTBOX + F.col("unmoved") * UNMOVED,
        topic=F.when(F.col("state") == COMMITTED, F.xxhash64("topic")),
        producer_group=F.xxhash64("producer_group"),
        digest="digest",
    )


def of_halves(rows: DataFrame, groups: Groups, bridged_us: int) -> DataFrame:
    """Table H of SQL storage, from spark.databases.Database.halves with `origin`.

    `bridged_us`: when a bridge of the storage last advanced. A bridge does not mark the rows that it sends; it has sent
    all messages committed until then.
    """
    is_waiting = (F.col("relayed") == UNSENT) & (F.col("decided_us") > bridged_us)
    unmoved = F.when(is_waiting | (F.col("relayed") == REFUSED), HALF_WAITS)
    unmoved = unmoved.when(F.col("relayed") == DROPPED, HALF_DROPPED).otherwise(0)
    outcomes = F.when(F.col("state") == "COMMITTED", F.lit(COMMITTED).bitwiseOR(unmoved))
    outcomes = outcomes.when(F.col("state") == "ROLLED_BACK", ROLLED_BACK)
    return shaped(
        rows,
        groups,
        topic=F.xxhash64("topic"),
        producer_group=F.xxhash64("producer_group"),
        origin="origin",
        half_us="half_us",
        outcomes=outcomes,
    )


def mask_of(groups: Column, block: int) -> Column:
    """A block of the mask of the groups in a list, whose elements have their bits."""
    return F.aggregate(groups, F.lit(0).cast("bigint"), lambda mask, group: mask.bitwiseOR(group[f"bit{block}"]))


def of_messages(rows: DataFrame, groups: Groups, log: int) -> DataFrame:
    """Tables H, Q and part of A, from spark.columns.MESSAGES with `topic_hash`, `group_hash`, `origin`, masks."""
    place = F.when(F.col("offset").isNotNull(), _place(log))
    masks: dict[str, Column | str] = {
        name: name for mask in MASKS for b in range(groups.blocks) if (name := f"{mask}{b}") in rows.columns
    }
    return shaped(
        rows,
        groups,
        topic="topic_hash",
        producer_group="group_hash",
        origin="origin",
        digest="digest",
        half_us="half_us",
        outcomes=F.when(
            F.col("outcome") > 0, F.col("outcome").cast("int") + F.coalesce("withdrawn", F.lit(0)).cast("int") * MARKS
        ),
        due_us="due_us",
        queued_us="queued_us",
        place=place,
        offset="offset",
        places=place,
        acked_us="acked_us",
        last_acked_us="last_acked_us",
        **masks,
    )


def _place(log: int) -> Column:
    topic = F.shiftleft(F.col("topic").cast("bigint"), _PLACE_TOPIC)
    return F.lit(log << _PLACE_LOG).bitwiseOR(topic).bitwiseOR(F.col("queue").cast("bigint"))


def place_of(log: int, topic: int, queue: int) -> int:
    return log << _PLACE_LOG | topic << _PLACE_TOPIC | queue


def parts_of_place(place: int) -> tuple[int, int, int]:
    """(log, topic number, queue)."""
    return place >> _PLACE_LOG, place >> _PLACE_TOPIC & 0xFFFFFFFF, place & 0xFFFF


def of_acks(rows: DataFrame, groups: Groups) -> DataFrame:
    """Table A of a log, from spark.scan.ACKS with the columns `bit0`, … of the group."""
    settled = F.col("kind") != ATTEMPTED
    acked = F.col("kind") == 0
    masks: dict[str, Column | str] = {}
    for block in range(groups.blocks):
        bit = F.col(f"bit{block}")
        masks[f"acked{block}"] = F.when(acked, bit)
        masks[f"settled{block}"] = F.when(settled, bit)
        masks[f"attempted{block}"] = F.when(~settled, bit)
    acked_us = F.when(acked, F.col("at_us"))
    return shaped(rows, groups, acked_us=acked_us, last_acked_us=acked_us, **masks)


def of_effects(rows: DataFrame, groups: Groups) -> DataFrame:
    """Table E, from spark.databases.Database.effects with the columns `bit0`, … of the group."""
    masks: dict[str, Column | str] = {f"effects{b}": f"bit{b}" for b in range(groups.blocks)}
    has_bit = reduce(Column.__or__, [F.col(f"bit{b}").isNotNull() for b in range(groups.blocks)])
    counted = F.when(has_bit & (F.col("replay") == 0), F.lit(1))
    return shaped(rows, groups, effect_us="at_us", inbox_rows=counted, **masks)


def of_proven(rows: DataFrame, groups: Groups) -> DataFrame:
    """Effects that --effects proves, from spark.effects with the columns `bit0`, … of the group."""
    masks: dict[str, Column | str] = {f"{PROVEN}{b}": f"bit{b}" for b in range(groups.blocks)}
    return shaped(rows, groups, **masks)


def together(parts: Sequence[DataFrame], groups: Groups) -> DataFrame:
    """One row for each message: (id, no) and the columns of the common shape.

    `other_topic`, `other_digest`, `other_producer_group` and `other_state` differ from `topic`, `digest`,
    `producer_group` and `t_state` if the rows of the inputs differ.
    """
    union = reduce(DataFrame.unionAll, parts)
    functions: dict[str, Any] = {"min": F.min, "max": F.max, "or": F.bit_or, "count": F.count}
    aggregates = [functions[_SHAPE[name][1]](name).alias(name) for name in _SHAPE]
    aggregates += [F.min(name).alias(f"other_{name}") for name in ("topic", "digest", "producer_group")]
    aggregates.append(F.max("t_state").alias("other_state"))
    names = [f"{mask}{b}" for mask in groups.masks for b in range(groups.blocks)]
    aggregates += [F.bit_or(name).alias(name) for name in names]
    return union.groupBy("id", "no").agg(*aggregates)
