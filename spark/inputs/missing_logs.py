"""Logs and storages that were not given although local rows name their shards.

A message that no given input has may be in one of them, and is then not LOST. The same holds for a message that took
effect although no given queue ever had it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.spark.checks.searches import MOST_FINDINGS
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.ranges import Span, id_at, made_us
from notify.spark.inputs.shards import names_of
from notify.spark.judge.cases import queued_among
from notify.spark.judge.completeness_proof import MANY
from notify.spark.judge.findings import about, has
from notify.spark.judge.message_rows import DATABASE, Groups
from notify.spark.judge.message_times import MADE_US
from notify.spark.judge.terms import Terms
from notify.spark.result import Covered, Inputs, Result
from notify.storage.log.gaps import OFFSETS_APART

SAMPLED = 200
"""How many transactions of a shard are looked for in the logs, at each end and in the middle of the shard's rows."""


def absent_shards(inputs: Inputs, span: Span | None, judged: Span) -> dict[int, list[str]]:
    """By the number of each database: the values of its column `shards` whose messages are in no given input.

    `span`: only rows of that time count. `judged`: the time for which logs must have every message. A storage knows the
    name of its shard, a log does not. If only logs were given, and at least as many as the rows name shards, a log that
    has no message of any shard may be one of those without a message, which are then lost. But next to logs of other
    shards one that has messages of that time, such as those of outboxes, is not a shard.
    """
    shard_values = {number: _shard_values(database, span) for number, database in enumerate(inputs.databases)}
    shards = {shard for values in shard_values.values() for value in values for shard in value.split(",")}
    storages = names_of(inputs.storages)
    are_enough = not (inputs.storages or inputs.kafka) and len(shards) <= len(inputs.logs)
    if are_enough and len(shards) < 2:
        return {}
    absent: dict[int, list[str]] = {}
    given: set[str] = set()
    logs_of_shards: set[str] = set()
    times: dict[str, tuple[int, int]] = {}
    for number, values in shard_values.items():
        for value in sorted(values):
            if storages & set(value.split(",")):
                continue
            sample = _sample(inputs.databases[number], value, judged)
            # If there are storages, bridges bring their messages into the log: only halves show that a log is a shard.
            having = {log.name for log in inputs.logs if _has_any([log], sample, of_halves=bool(storages))}
            logs_of_shards |= having
            given |= set(value.split(",")) if having else set()
            if not having and len(sample) >= (MANY if are_enough else 1):
                absent.setdefault(number, []).append(value)
                made = sorted(ids.milliseconds(transaction) * 1000 for transaction in sample)
                times |= dict.fromkeys(value.split(","), (made[0], made[-1]))
    times = {shard: made for shard, made in times.items() if shard not in given}
    others = [log for log in inputs.logs if log.name not in logs_of_shards]
    spare = [log for log in others if not logs_of_shards or any(not _has_of(log, *made) for made in times.values())]
    return {} if are_enough and len(times) <= len(spare) else absent


def _has_of(log: LogInput, from_us: int, to_us: int) -> bool:
    """Whether a log has messages that were written between two instants."""
    return any(facts.messages and facts.first_us <= to_us and facts.last_us >= from_us for facts in log.facts)


def delivered_elsewhere(
    spark: SparkSession, inputs: Inputs, rows: DataFrame, terms: Terms, from_us: int
) -> dict[int, int]:
    """How many LOST messages took effect, by the number of their database; empty if a missing log does not explain it.

    Offsets of a queue have no gaps, so that a message that is lost from a given log leaves a gap. If more messages took
    effect than there are gaps, other servers delivered them. Messages that a log may have lost with its disk are not
    counted: they leave no gap. Nor are those that a repair published again: they took effect by the log that lost them.
    `rows`: see spark.rows.MessageRows. `from_us`: none of the messages was written before.
    """
    if inputs.kafka or not inputs.logs:
        return {}
    number = F.shiftright("t_state", DATABASE.bit_length() - 1)
    may_be_forgotten = F.expr(about(MADE_US, terms.lost, terms.slack_us))
    is_lost = has("LOST") & F.col("effect_us").isNotNull() & ~may_be_forgotten
    lost = rows.where(is_lost).select(number.alias("number"), "id", "no")
    counts = Counter({row["number"]: row["count"] for row in lost.groupBy("number").count().collect()})
    if counts.total() >= MANY:
        counts -= _published_again(spark, inputs, lost, from_us)
    if counts.total() < MANY or counts.total() - _gaps(spark, inputs, from_us) < MANY:
        return {}
    return dict(counts)


def _published_again(spark: SparkSession, inputs: Inputs, lost: DataFrame, from_us: int) -> Counter[int]:
    """How many of these messages (number, id, no) a repair published again, by number; it looks at MOST_FINDINGS."""
    numbers = {
        ids.derived(bytes(row["id"]), ids.republished(row["no"])): row["number"]
        for row in lost.limit(MOST_FINDINGS).collect()
    }
    return Counter(numbers[again] for again in queued_among(spark, inputs, numbers, from_us))


def _gaps(spark: SparkSession, inputs: Inputs, from_us: int) -> int:
    """How many offsets the logs lack between the first and the last offset that they have of each queue.

    What a restore skips (OFFSETS_APART, or a multiple) is left out: no message ever had these offsets.
    """
    gaps = 0
    for log in inputs.logs:
        stored = log.stored(spark, Groups([]), from_us)
        if stored is None:
            continue
        offset = F.col("offset")
        ranges = stored.where(offset.isNotNull()).groupBy("topic", "queue").agg(
            F.pmod(F.max(offset) - F.min(offset) + 1 - F.count_distinct(offset), F.lit(OFFSETS_APART)).alias("gaps")
        )  # fmt: skip
        gaps += sum(row[0] or 0 for row in ranges.agg(F.sum("gaps")).collect())
    return gaps


def note_elsewhere(result: Result, inputs: Inputs, counts: Mapping[int, int]) -> None:
    """Add the reasons why the audit is inconclusive, and the lines of coverage."""
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
    """A sentence that says why messages of a shard cannot be judged."""
    return (
        f"database {database} has committed messages whose halves are on shard {value}, and no given log or storage is "
        "that shard: name the data directory of its server with --log, or its database with --storage"
    )


def judged_span(log_from_us: int, closed_before_us: int, slack_us: int) -> Span:
    """The time for which logs must have every message.

    It begins `slack_us` after the beginning of the log: retention may have dropped messages whose ids are a little
    newer than that beginning.
    """
    return Span(log_from_us + slack_us if log_from_us else 0, closed_before_us)


def note(result: Result, inputs: Inputs, absent: Mapping[int, Sequence[str]]) -> None:
    """Add the reasons why the audit is inconclusive, and the lines of coverage."""
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
    """(id): the committed transactions of these shards in the span; None if there is no shard."""
    tables = []
    for number, values in absent.items():
        listed = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        condition = f"state = 'COMMITTED' AND shards IN ({listed})"
        tables.append(inputs.databases[number].transactions(spark, span, condition))
    return reduce(DataFrame.unionAll, tables).distinct() if tables else None


def _has_half_on_shard() -> sa.ColumnElement[bool]:
    columns = half_message.c
    return sa.and_(columns.state == "COMMITTED", columns.mode == "half", columns.shards != "")


def _shard_values(database: Database, span: Span | None) -> set[str]:
    """The values of the column `shards` in committed rows of the span."""
    if half_message.name not in database.tables:
        return set()
    columns = half_message.c
    query = sa.select(columns.shards).where(_has_half_on_shard()).distinct()
    if span is not None:
        transaction_id = columns.transaction_id
        query = query.where(transaction_id >= id_at(span.start_us), transaction_id < id_at(span.end_us))
    with database.reading() as connection:
        return {str(row[0]) for row in connection.execute(query)}


def _sample(database: Database, value: str, judged: Span) -> set[bytes]:
    """Ids of some transactions whose column `shards` has this value."""
    column = half_message.c.transaction_id
    in_span = (column >= id_at(judged.start_us), column < id_at(judged.end_us))
    within = sa.and_(_has_half_on_shard(), half_message.c.shards == value, *in_span)
    with database.reading() as connection:
        first, last = connection.execute(sa.select(sa.func.min(column), sa.func.max(column)).where(within)).one()
        middle = id_at(((made_us(first) or 0) + (made_us(last) or 0)) // 2)
        some = sa.select(column).where(within).limit(SAMPLED)
        queries = (some.order_by(column), some.where(column >= middle).order_by(column), some.order_by(column.desc()))
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
