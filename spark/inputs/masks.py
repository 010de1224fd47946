"""Masks of consumer groups: a segment numbers its own groups, and an audit numbers the groups of all its inputs.

Each row names its segment's list of groups by a number, so that one query reads segments with different lists. A table,
which every task has, translates the bits of each list. A mask is looked up there in pieces of four bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.spark.inputs.columns import list_number, with_bits
from notify.spark.judge.message_rows import Groups
from notify.spark.small_table import small_table

MASKS = ("acked", "settled", "attempted")
LIST = "groups"
"""The column with the number of the list."""
PIECE_BITS = 4
_VALUES = 1 << PIECE_BITS


def lookups(names: Sequence[str], groups: Groups) -> NDArray[np.int64]:
    """A row for each block of the masks of `groups`; at 16 * piece + value it has the mask for this value of a piece.

    `names`: the groups of a segment, in the order of its bits.
    """
    pieces = -(-len(names) // PIECE_BITS)
    tables = np.zeros((groups.blocks, pieces * _VALUES), np.int64)
    for block, table in enumerate(tables):
        for number, name in enumerate(names):
            first, bit = number // PIECE_BITS * _VALUES, 1 << number % PIECE_BITS
            # A value with this bit means the groups of the value without it, and one group more.
            table[first + bit : first + 2 * bit] = table[first : first + bit] | groups.bit(name, block)
    return tables


def renumbered(spark: SparkSession, rows: DataFrame, lists: Iterable[Sequence[str]], groups: Groups) -> DataFrame:
    """Rows of spark.columns.MESSAGES with the masks `acked0`, … of `groups` instead of the masks of their segments.

    `lists`: the groups of each segment from which the rows come.
    """
    names_by_list = {list_number(names): with_bits(names) for names in lists}
    tables = {number: lookups(names, groups) for number, names in names_by_list.items()}
    others = [name for name in rows.columns if name not in (*MASKS, LIST)]
    blocks = range(groups.blocks)
    if len({table.tobytes() for table in tables.values()}) == 1:  # all segments of most logs have one list: no join
        (names, *_) = names_by_list.values()
        masks = {f"{mask}{b}": _by_bits(F.col(mask), names, groups, b) for mask in MASKS for b in blocks}
    else:
        columns = {LIST: pa.int64()} | {f"bits{b}": pa.list_(pa.int64()) for b in blocks}
        table = small_table(spark, columns, [(number, *of_list) for number, of_list in tables.items()])
        rows = rows.join(F.broadcast(table), LIST, "left")
        pieces = max(of_list.shape[1] for of_list in tables.values()) // _VALUES
        masks = {f"{mask}{b}": _looked_up(F.col(mask), F.col(f"bits{b}"), pieces) for mask in MASKS for b in blocks}
    return rows.select(*others, *[column.alias(name) for name, column in masks.items()])


def _by_bits(mask: Column, names: Sequence[str], groups: Groups, block: int) -> Column:
    """A block of the mask, if all segments number their groups alike."""
    bits = [(number, groups.bit(name, block)) for number, name in enumerate(names)]
    if all(bit in (0, 1 << number) for number, bit in bits):
        return mask.bitwiseAND(F.lit(sum(bit for _, bit in bits)).cast("bigint"))
    parts = [F.when(mask.bitwiseAND(F.lit(1 << n)) != 0, F.lit(bit)).otherwise(0) for n, bit in bits if bit]
    return reduce(lambda total, part: total + part, parts, F.lit(0)).cast("bigint")


def _looked_up(mask: Column, table: Column, pieces: int) -> Column:
    """The mask, translated by the table of its segment's list; a list of fewer groups has a shorter table."""

    def piece(number: int) -> Column:
        value = F.shiftrightunsigned(mask, PIECE_BITS * number).bitwiseAND(F.lit(_VALUES - 1).cast("bigint"))
        return F.coalesce(F.get(table, value + F.lit(_VALUES * number)), F.lit(0).cast("bigint"))

    # A message that no group settled in its segment has no mask, and needs no lookup.
    translated = reduce(Column.bitwiseOR, map(piece, range(pieces)), F.lit(0).cast("bigint"))
    return F.when(mask.isNotNull(), translated)
