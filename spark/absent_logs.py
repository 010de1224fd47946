"""Logs and storages that were not given, although local rows name their shards: a message that no given input has may
be in one of them, and is not LOST. So it is with messages that took effect, and that no given queue ever had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify import ids
from notify.client.table import half_message
from notify.spark.databases import Database
from notify.spark.findings import has
from notify.spark.life import DATABASE, Groups
from notify.spark.log_input import LogInput
from notify.spark.proof import MANY
from notify.spark.ranges import Span, id_at, made_us
from notify.spark.result import Covered, Inputs, Result
from notify.spark.shards import names_of

SAMPLED = 200
"""So many transactions of a shard are looked for in the logs, at each end and in the middle of the shard's rows."""


def absent_shards(inputs: Inputs, span: Span | None, judged: Span) -> dict[int, list[str]]:
    """Values of the column `shards` by the number of their database: those of whose messages no given input has any.

    `span`: only values in rows of that time. `judged`: the time of which logs must have every message. A storage knows
    the name of its shard, and a log does not. So where only logs were given, and as many as the rows name shards, there
    is none: then a message that is in none of the logs is lost.
    """
    named = {number: _named(database, span) for number, database in enumerate(inputs.databases)}
    shards = {shard for values in named.values() for value in values for shard in value.split(",")}
    storages = names_of(inputs.storages)
    if not (inputs.storages or inputs.kafka) and len(shards) <= len(inputs.logs):
        return {}
    absent: dict[int, list[str]] = {}
    for number, values in named.items():
        for value in sorted(values):
            if storages & set(value.split(",")):
                continue
            sample = _sample(inputs.databases[number], value, judged)
            # Beside storages, a log has messages of each of them from bridges: only halves show that it is a shard.
            if sample and not _has_any(inputs.logs, sample, of_halves=bool(storages)):
                absent.setdefault(number, []).append(value)
    return absent


def delivered_elsewhere(spark: SparkSession, inputs: Inputs, rows: DataFrame, from_us: int) -> dict[int, int]:
    """How many LOST messages took effect, by the number of their database; empty unless a log was not given.

    Offsets of a queue have no gaps: a message that was in a given queue once, and is lost from its log, leaves one.
    What took effect beyond the number of gaps was delivered by other servers. `rows`: see spark.rows.MessageRows;
    `from_us`: what was written before has none of them.
    """
    if inputs.kafka or not inputs.logs:
        return {}
    number = F.shiftright("t_state", DATABASE.bit_length() - 1)
    lost = rows.where(has("LOST") & F.col("effect_us").isNotNull()).groupBy(number.alias("number")).count()
    counts = {row["number"]: row["count"] for row in lost.collect()}
    if sum(counts.values()) < MANY or sum(counts.values()) - _gaps(spark, inputs, from_us) < MANY:
        return {}
    return counts


def _gaps(spark: SparkSession, inputs: Inputs, from_us: int) -> int:
    """How many offsets the logs lack, within what each has of a queue."""
    gaps = 0
    for log in inputs.logs:
        stored = log.stored(spark, Groups([]), from_us)
        if stored is None:
            continue
        offset = F.col("offset")
        ranges = stored.where(offset.isNotNull()).groupBy("topic", "queue").agg(
            (F.max(offset) - F.min(offset) + 1 - F.count_distinct(offset)).alias("gaps")
        )  # fmt: skip
        gaps += sum(row[0] or 0 for row in ranges.agg(F.sum("gaps")).collect())
    return gaps


def note_elsewhere(result: Result, inputs: Inputs, counts: Mapping[int, int]) -> None:
    """Add the reasons to doubt, and the lines of coverage."""
    for number, count in sorted(counts.items()):
        name = inputs.databases[number].name
        result.reasons.append(
            f"{count} committed messages of database {name} took effect, and no given log ever had them: a server "
            "delivered them whose log was not given (name its data directory with --log), or a log was replaced by an "
            "older copy"
        )
        result.coverage.append(
            Covered(f"database {name}", "shard", "its messages that took effect", f"{count} in no log", is_whole=False)
        )


def reason_of(database: str, value: str) -> str:
    """Why messages of a shard cannot be judged, in words."""
    return (
        f"database {database} has committed messages whose halves are on shard {value}, and no given log or storage is "
        "that shard: name the data directory of its server with --log, or its database with --storage"
    )


def judged_span(log_from_us: int, closed_before_us: int, slack_us: int) -> Span:
    """The time of which logs must have every message: retention may have dropped what an id says was made soon after a
    log's beginning."""
    return Span(log_from_us + slack_us if log_from_us else 0, closed_before_us)


def note(result: Result, inputs: Inputs, absent: Mapping[int, Sequence[str]]) -> None:
    """Add the reasons to doubt, and the lines of coverage."""
    for number, values in absent.items():
        database = inputs.databases[number].name
        for value in values:
            result.reasons.append(reason_of(database, value))
            result.coverage.append(
                Covered(f"database {database}", "shard", f"messages of shard {value}", "none", is_whole=False)
            )


def transactions_of(
    spark: SparkSession, inputs: Inputs, span: Span | None, absent: Mapping[int, Sequence[str]]
) -> DataFrame | None:
    """(id): the committed transactions of these shards, of a time; None without a shard."""
    parts = []
    for number, values in absent.items():
        listed = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        condition = f"state = 'COMMITTED' AND shards IN ({listed})"
        parts.append(inputs.databases[number].transactions(spark, span, condition))
    return reduce(DataFrame.unionAll, parts).distinct() if parts else None


def _of_halves() -> sa.ColumnElement[bool]:
    t = half_message.c
    return sa.and_(t.state == "COMMITTED", t.mode == "half", t.shards != "")


def _named(database: Database, span: Span | None) -> set[str]:
    """The values of the column in rows of a time."""
    if half_message.name not in database.tables:
        return set()
    t = half_message.c
    query = sa.select(t.shards).where(_of_halves()).distinct()
    if span is not None:
        query = query.where(t.transaction_id >= id_at(span.start_us), t.transaction_id < id_at(span.end_us))
    with database.reading() as connection:
        return {str(row[0]) for row in connection.execute(query)}


def _sample(database: Database, value: str, judged: Span) -> set[bytes]:
    """Some transactions of a value."""
    name = half_message.c.transaction_id
    of_time = (name >= id_at(judged.start_us), name < id_at(judged.end_us))
    within = sa.and_(_of_halves(), half_message.c.shards == value, *of_time)
    with database.reading() as connection:
        first, last = connection.execute(sa.select(sa.func.min(name), sa.func.max(name)).where(within)).one()
        middle = id_at(((made_us(first) or 0) + (made_us(last) or 0)) // 2)
        chosen = sa.select(name).where(within).limit(SAMPLED)
        queries = (chosen.order_by(name), chosen.where(name >= middle).order_by(name), chosen.order_by(name.desc()))
        texts = {str(row[0]) for query in queries for row in connection.execute(query)}
    return set(_decoded(texts))


def _decoded(texts: set[str]) -> Iterator[bytes]:
    for text in texts:
        try:
            yield ids.from_text(text)
        except ValueError:
            continue  # malformed.py reports it


def _has_any(logs: Sequence[LogInput], transactions: set[bytes], *, of_halves: bool) -> bool:
    rows = (row for log in logs for row in log.messages_of(transactions))
    return any(row["half_us"] is not None or not of_halves for row in rows)
