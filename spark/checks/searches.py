"""Findings that the row of one message cannot show: damage, gaps of a bridge, order of a key, doubled effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from notify.protocol import ids
from notify.spark.inputs.catalog import Bridged
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.effects import BusinessEffects
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.ranges import EPOCH_US, Span
from notify.spark.judge.message_rows import Groups
from notify.spark.judge.message_times import MADE_US
from notify.spark.result import Found
from notify.spark.small_table import small_table
from notify.storage.groups import SettleKind

MOST_FINDINGS = 100_000
"""The most rows of evidence for a class; the count of its findings stays exact."""


def corrupt(log: LogInput, holds: Callable[[int], bool]) -> tuple[list[Found], int]:
    """The damages of a log, and the number of all. `holds`: whether an instant is audited."""
    cases = [
        Found(
            "CORRUPT", broken["id"] or "", broken["no"] or 0, broken["detail"], at_us=broken["time_us"], log=log.name,
            evidence={"position": broken["position"], "end": broken["end"], "is_read": broken["read"]},
        )
        for broken in log.broken() if holds(broken["time_us"])
    ]  # fmt: skip
    return cases, len(cases) + sum(facts.broken_left for facts in log.facts if holds(facts.last_us))


def gaps(name: str, bridges: Iterable[Bridged]) -> Iterable[Found]:
    """Findings for bridges that did not continue from their last position. `name`: the name of the input.

    `bridges`: the records of the input's bridges, in order.
    """
    last: dict[str, Bridged] = {}
    for bridged in bridges:
        source, since = bridged.source, bridged.since
        before = last.get(source)
        last[source] = bridged
        if before is None:
            continue
        if since is not None and since != before.position:
            origin = since or "its beginning"
            detail = f"source {source} continued from {origin}, but its position was {before.position}"
        elif bridged.epoch < before.epoch:
            detail = f"source {source}: epoch {bridged.epoch} wrote after epoch {before.epoch}"
        else:
            continue
        yield Found(
            "BRIDGE_GAP", detail=detail, at_us=bridged.time_us, log=name,
            evidence={
                "position": bridged.at, "from": before.position, "to": since, "source": source,
                "from_us": before.time_us,
            },
        )  # fmt: skip


def most_of(rows: DataFrame) -> tuple[list[Row], int]:
    """At most MOST_FINDINGS rows, and the number of all rows."""
    first_rows = rows.limit(MOST_FINDINGS).collect()
    return first_rows, len(first_rows) if len(first_rows) < MOST_FINDINGS else rows.count()


def disorder(spark: SparkSession, log: LogInput, span: Span | None) -> tuple[list[Found], int]:
    """Messages that an ordered group settled after a later message of the same key, and the number of all."""
    ordered = [s for s in log.catalog.subscriptions.values() if s.mode == "ordered"]
    numbers = {name: number for number, name in log.catalog.topics.items()}
    wanted = [(name_hash(s.group), s.group, numbers[s.topic], list(s.moved)) for s in ordered if s.topic in numbers]
    if not wanted:
        return [], 0
    acks = log.acks(spark, span.start_us if span else 0)
    if acks is None:
        return [], 0
    columns = {
        "consumer_group": pa.int64(), "group": pa.string(), "topic": pa.int64(), "moved": pa.list_(pa.int64()),
    }  # fmt: skip
    subscriptions = F.broadcast(small_table(spark, columns, wanted))
    topics = sorted({topic for _, _, topic, _ in wanted})
    if len(topics) <= 1000:
        acks = acks.where(F.col("topic").isin(topics))
    settled = acks.where(
        F.col("kind").isin(int(SettleKind.ACK), int(SettleKind.DEAD_LETTER)) & (F.col("key_hash") != 0)
    ).join(subscriptions, ["consumer_group", "topic"])
    settled = settled.withColumn("epoch", F.size(F.filter("moved", lambda position: position <= F.col("seq"))))
    late = settled_late(settled, log.acks_from(span.start_us if span else 0))
    cases = []
    rows, count = most_of(within(late, span))
    for row in rows:
        topic = log.catalog.topics.get(row["topic"], "")
        cases.append(
            Found(
                "DISORDER", ids.to_text(bytes(row["id"])), row["no"],
                f"group {row['group']} settled offset {row['offset']} after {row['highest']} of the same key",
                topic, row["queue"], row["offset"], "", [row["group"]], row["at_us"], "", log.name,
                {"settled_us": row["at_us"], "after_offset": row["highest"]},
            )
        )  # fmt: skip
    return cases, count


def misdated(
    spark: SparkSession, log: LogInput, span: Span | None, judged: Span | None, slack_us: int
) -> tuple[list[Found], int]:
    """Halves that were stored in the time `judged` but have ids of a time outside of `span`, and the number of all.

    The audit does not read the local rows of such ids. `span` None: every id is in the span. `slack_us`: the longest
    time between a half and the time in its id.
    """
    if span is None or judged is None or log.apart_us(span.start_us) <= slack_us:
        return [], 0
    stored = log.stored(spark, Groups([]), span.start_us)
    if stored is None:
        return [], 0
    is_judged = F.col("half_us").between(judged.start_us, judged.end_us - 1)
    is_apart = F.abs(F.col("half_us") - F.expr(MADE_US)) > slack_us
    halves = stored.where(is_judged & is_apart & ~_is_within(span)).select("id", "no", "topic", "half_us").distinct()
    cases = []
    rows, count = most_of(halves)
    for row in rows:
        transaction = bytes(row["id"])
        hours = (row["half_us"] / 1000 - ids.milliseconds(transaction)) / 3.6e6
        text = (
            f"the half is dated {abs(hours):,.2f} hours {'after' if hours > 0 else 'before'} its id was made; "
            "its local row was not read"
        )
        cases.append(
            Found(
                "MISDATED", ids.to_text(transaction), row["no"], text, log.catalog.topics.get(row["topic"], ""),
                at_us=row["half_us"], log=log.name, evidence={"half_us": row["half_us"]},
            )
        )  # fmt: skip
    return cases, count


def doubled(spark: SparkSession, effects: BusinessEffects, between: Span | None) -> tuple[list[Found], int]:
    """Effects that the user's query returns more than once, and the number of all. Their ids may be malformed.

    `between`: only effects with ids of that time.
    """
    cases = []
    database = effects.database.name
    rows, count = most_of(effects.doubled(spark, between))
    for row in rows:
        groups = [row["consumer_group"]] if row["consumer_group"] else []
        detail = f"the effect happened {row['times']} times"
        evidence = {"times": row["times"]}
        try:
            transaction, number = ids.parse_message_id(row["message_id"])
        except ValueError:
            detail = f"--effects returned {row['message_id'][:60]!r}, which is not a message id: {detail}"
            evidence["id"] = row["message_id"]
            cases.append(Found("DUP_EFFECT", detail=detail, groups=groups, database=database, evidence=evidence))
            continue
        made_us = ids.milliseconds(transaction) * 1000
        name = ids.to_text(transaction)
        cases.append(
            Found(
                "DUP_EFFECT", name, number, detail, groups=groups, at_us=made_us, database=database,
                evidence=evidence,
            )
        )  # fmt: skip
    return cases, count


def within(rows: DataFrame, span: Span | None) -> DataFrame:
    """The rows whose ids were made in the span or count as ids without a time (see Span)."""
    return rows if span is None else rows.where(_is_within(span))


def _is_within(span: Span) -> Column:
    is_within = (F.col("id") >= _first_bytes(span.start_us)) & (F.col("id") < _first_bytes(span.end_us))
    if span.ahead_us:
        is_within |= F.col("id") < _first_bytes(min(EPOCH_US, span.start_us))
        is_within |= F.col("id") >= _first_bytes(span.after_us)
    return is_within


def _first_bytes(us: int) -> Column:
    """The first bytes of ids made at an instant."""
    return F.lit(min(max(0, us // 1000), (1 << 48) - 1).to_bytes(6))


HOT_ROWS = 1_000_000
"""A key with more rows is hot: its rows are spread over tasks."""
PART_BYTES = 64 << 20
"""How many bytes of the log one part of a hot key covers."""
MOST_HOT_KEYS = 10_000
"""The most hot keys that are spread; further ones stay in one task each."""
_KEY = ["group", "topic", "queue", "key_hash", "epoch"]


def settled_late(settled: DataFrame, rows: int) -> DataFrame:
    """The rows that were settled after a row of the same key with a higher offset, which is added as `highest`.

    `settled`: rows of group, topic, queue, key_hash, epoch, `seq` (place in the log) and offset. `rows`: their
    approximate number. A window over all rows of a key sorts them in one task. A key with many rows is therefore cut
    into parts by place in the log. An aggregate gives the highest offset of each part, and each part is a window that
    begins with the highest offset before it.
    """
    if rows <= HOT_ROWS:
        return _late(settled, _KEY)
    hot = settled.groupBy(*_KEY).count().where(F.col("count") > HOT_ROWS).select(*_KEY).limit(MOST_HOT_KEYS)
    hot = F.broadcast(hot)
    cold = _late(settled.join(hot, _KEY, "left_anti"), _KEY)
    return cold.unionByName(_late_of_hot(settled.join(hot, _KEY, "left_semi")))


def _late_of_hot(settled: DataFrame) -> DataFrame:
    parted = settled.withColumn("part", F.floor(F.col("seq") / PART_BYTES))
    highest = parted.groupBy(*_KEY, "part").agg(F.max("offset").alias("highest_there"))
    before = Window.partitionBy(*_KEY).orderBy("part").rowsBetween(Window.unboundedPreceding, -1)
    earlier = highest.withColumn("highest_before", F.max("highest_there").over(before)).drop("highest_there")
    joined = parted.join(earlier, [*_KEY, "part"])
    return _late(joined, [*_KEY, "part"], F.col("highest_before")).drop("part", "highest_before")


def _late(settled: DataFrame, key: list[str], earlier: Column | None = None) -> DataFrame:
    """`earlier`: the highest offset before the rows of this key."""
    before = Window.partitionBy(*key).orderBy("seq", "offset").rowsBetween(Window.unboundedPreceding, -1)
    highest = F.max("offset").over(before)
    if earlier is not None:
        highest = F.greatest(highest, earlier)  # ignores null
    return settled.withColumn("highest", highest).where("highest > offset")
