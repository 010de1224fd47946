"""The first look of an audit: digests of all inputs, their comparison, and what is left to read row by row."""

from __future__ import annotations

import os
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import sqlalchemy as sa
from pyspark.sql import SparkSession

from notify.errors import Unavailable
from notify.runtime.databases import reason_of
from notify.spark.digest.comparison import Compared, Comparison, Equal
from notify.spark.digest.drill import Drill
from notify.spark.digest.log_slots import LogSlot, LogSlots
from notify.spark.digest.logs import LogDigest, TooManyParts
from notify.spark.digest.slots import LAST_SLOT, slot_of
from notify.spark.digest.tables import TableDigest, TableSlots
from notify.spark.judge.coverage import Coverage
from notify.spark.judge.deadlines import InTime
from notify.spark.judge.message_rows import Groups
from notify.spark.judge.rows import producer_groups
from notify.spark.result import Inputs

MOST_QUERIES_AT_ONCE = 4
MOST_BEGINNINGS = 100
"""The most beginnings of invalid ids; a table with more is read whole."""
_PLAIN = frozenset(string.ascii_letters + string.digits + " -_.:@/")
MOST_SHARE = 0.5
"""If a larger share of the messages is in unequal slots, all are read, which is quicker than many ranges."""


@dataclass
class Looked:
    """The result of a first look."""

    equal: list[Equal] = field(default_factory=list)
    compared: int = 0
    """How many slots were compared."""
    drill: Drill | None = None
    """The part to read; None: everything, or nothing where `is_whole`."""
    is_whole: bool = False
    """Whether nothing is to be read."""
    with_rows: set[str] | None = None
    """The producer groups with local rows, if all of them are known."""
    problem: str = ""
    """Why there is no digest."""


_NO_FUNCTION = 1305


def _reason(error: Exception) -> str:
    """Why there is no digest, and what makes one possible."""
    reason = reason_of(error)
    if getattr(getattr(error, "orig", None), "args", ())[:1] == (_NO_FUNCTION,):
        reason += " (MySQL 9.6 and later has MD5 only after INSTALL COMPONENT 'file://component_classic_hashing')"
    return reason


class FirstLook:
    """Compares the digests of some inputs."""

    def __init__(
        self,
        spark: SparkSession,
        inputs: Inputs,
        groups: Groups,
        coverage: Coverage,
        in_time: InTime,
        known: Collection[str] = (),
    ) -> None:
        """`known`: producer groups that have local rows; empty: each table is asked for all of them."""
        self._known = known
        self._spark = spark
        self._inputs = inputs
        self._groups = groups
        self._coverage = coverage
        self._in_time = in_time

    def look(self, wanted: Collection[str], most_share: float = MOST_SHARE) -> Looked:
        """`wanted`: classes of findings whose cases are wanted although they fail no audit. `most_share`: if more
        of the messages lie in unequal slots, all are to be read."""
        if self._inputs.kafka or self._inputs.storages:
            return Looked(problem="it compares the logs of servers, and there are other inputs")
        try:
            tables, logs = self._digests()
        except (sa.exc.SQLAlchemyError, TooManyParts, Unavailable) as error:
            return Looked(problem=_reason(error))
        read = {group for table in tables for group in table.producer_groups}
        if self._coverage.span is None:
            with_rows = read
        elif self._known:
            with_rows = read.union(self._known)
        else:
            with_rows = producer_groups(self._inputs)
        covered = frozenset(with_rows)
        comparison = Comparison(tables, logs, self._coverage, self._in_time.with_inbox, covered)
        return replace(_to_read(comparison.compared(wanted), tables, logs, most_share), with_rows=with_rows)

    def _digests(self) -> tuple[list[TableSlots], dict[int, LogSlot]]:
        """The digests of the databases, and of all logs together."""
        span = self._coverage.span
        tables = [TableDigest(database, span) for database in self._inputs.databases]
        logs = LogSlots(self._groups, self._coverage.origins, self._in_time)
        with ThreadPoolExecutor(min(MOST_QUERIES_AT_ONCE, max(2, os.cpu_count() or 2))) as pool:
            begun = [future for table in tables for future in table.start(pool)]
            try:
                for number, log in enumerate(self._inputs.logs):
                    digest = LogDigest(self._spark, log, self._groups, self._in_time)
                    waits_from_us = self._coverage.terms.closed_before_us
                    logs.add(number, log, digest.rows(span.start_us if span else 0, waits_from_us))
                for future in begun:
                    future.result()()
            finally:
                for future in begun:
                    future.cancel()
        return [table.slots for table in tables], logs.slots


def _to_read(
    compared: Compared, tables: Sequence[TableSlots], logs: Mapping[int, LogSlot], most_share: float
) -> Looked:
    """The part to read after a comparison."""
    beginnings = {text for table in tables for text in table.beginnings}
    unequal = set(compared.unequal) | {slot for text in beginnings if (slot := slot_of(text.lower())) is not None}
    count = len(unequal.union(known.slot for known in compared.equal))
    everything = Looked(compared=count)
    if len(beginnings) > MOST_BEGINNINGS or not all(_PLAIN.issuperset(text) for text in beginnings):
        return everything
    if any(slot > LAST_SLOT for slot in unequal):
        return everything
    drill = Drill.into(unequal, beginnings)
    equal = [known for known in compared.equal if known.slot not in drill]
    kept = {known.slot for known in equal}
    sizes: Counter[bool] = Counter()
    for slot, log in logs.items():
        if slot in kept or slot in drill:
            sizes[slot in kept] += sum(figures["messages"] for figures in log.topics.values())
    if sizes[False] > most_share * sizes.total():
        return everything
    if not unequal and not beginnings:
        return Looked(equal, count, is_whole=True)
    return Looked(equal, count, replace(drill, messages=sizes[False]))
