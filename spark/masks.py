"""Masks of consumer groups: a segment numbers those that it knows, and an audit those of all its inputs.

Each row names its segment's list of groups by a number, so that segments with different lists are read at once. The
meaning of each list's bits is a row of a table, which goes to every task. A mask is looked up there in pieces of four
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.spark.columns import list_number, with_bits
from notify.spark.life import Groups
from notify.spark.small_table import small_table

MASKS = ("acked", "settled", "attempted")
LIST = "groups"
"""The column that names the list."""
PIECE_BITS = 4
_VALUES = 1 << PIECE_BITS


def lookups(names: Sequence[str], groups: Groups) -> NDArray[np.int64]:
    """A row for each block of the masks of `groups`: at 16 * piece + value, the groups that this value of a piece
    stands for. `names`: those of a segment, in the order of its mask's bits."""
    pieces = -(-len(names) // PIECE_BITS)
    tables = np.zeros((groups.blocks, pieces * _VALUES), np.int64)
    for block, table in enumerate(tables):
        for n, name in enumerate(names):
            first, bit = n // PIECE_BITS * _VALUES, 1 << n % PIECE_BITS
            # The values with this bit are those without it, and one group more.
            table[first + bit : first + 2 * bit] = table[first : first + bit] | groups.bit(name, block)
    return tables


def renumbered(spark: SparkSession, rows: DataFrame, lists: Iterable[Sequence[str]], groups: Groups) -> DataFrame:
    """Rows of spark.columns.MESSAGES with the masks `acked0`, … of `groups` instead of their segments' own.

    `lists`: the groups of each segment that the rows are of.
    """
    known = {list_number(names): with_bits(names) for names in lists}
    tables = {number: lookups(names, groups) for number, names in known.items()}
    kept = [name for name in rows.columns if name not in (*MASKS, LIST)]
    blocks = range(groups.blocks)
    if len({table.tobytes() for table in tables.values()}) == 1:  # so it is in most logs: there is nothing to join
        (names, *_) = known.values()
        made = {f"{mask}{b}": _by_bits(F.col(mask), names, groups, b) for mask in MASKS for b in blocks}
    else:
        columns = {LIST: pa.int64()} | {f"bits{b}": pa.list_(pa.int64()) for b in blocks}
        table = small_table(spark, columns, [(number, *of_list) for number, of_list in tables.items()])
        rows = rows.join(F.broadcast(table), LIST, "left")
        pieces = max(of_list.shape[1] for of_list in tables.values()) // _VALUES
        made = {f"{mask}{b}": _looked_up(F.col(mask), F.col(f"bits{b}"), pieces) for mask in MASKS for b in blocks}
    return rows.select(*kept, *[column.alias(name) for name, column in made.items()])


def _by_bits(mask: Column, names: Sequence[str], groups: Groups, block: int) -> Column:
    """A mask of segments that all number their groups alike."""
    known = [(n, groups.bit(name, block)) for n, name in enumerate(names)]
    if all(bit in (0, 1 << n) for n, bit in known):
        return mask.bitwiseAND(F.lit(sum(bit for _, bit in known)).cast("bigint"))
    parts = [F.when(mask.bitwiseAND(F.lit(1 << n)) != 0, F.lit(bit)).otherwise(0) for n, bit in known if bit]
    return reduce(lambda a, b: a + b, parts, F.lit(0)).cast("bigint")


def _looked_up(mask: Column, table: Column, pieces: int) -> Column:
    """A mask by the table of its segment's list; lists of fewer groups have shorter tables."""

    def piece(n: int) -> Column:
        value = F.shiftrightunsigned(mask, PIECE_BITS * n).bitwiseAND(F.lit(_VALUES - 1).cast("bigint"))
        return F.coalesce(F.get(table, value + F.lit(_VALUES * n)), F.lit(0).cast("bigint"))

    # A message that no group settled in its segment has no mask, and needs no lookup.
    found = reduce(Column.bitwiseOR, map(piece, range(pieces)), F.lit(0).cast("bigint"))
    return F.when(mask.isNotNull(), found)
