"""The cases of an audit: each finding with its evidence, and whether it has been repaired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.client.tables.definitions import notify_inbox
from notify.protocol import ids
from notify.spark.checks import searches
from notify.spark.inputs.changes import Left
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.databases import Database
from notify.spark.inputs.expressions import Expressions
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge import findings, message_rows
from notify.spark.judge.evidence import LOCAL, NOT_GIVEN, STATES, detail, groups_of
from notify.spark.judge.findings import BY_NAME
from notify.spark.judge.message_rows import Groups
from notify.spark.judge.terms import SKEW_US
from notify.spark.result import Found, Inputs
from notify.spark.small_table import small_table
from notify.spark.times import instant_text

ROWS_A_QUERY = 500
"""How many inbox rows one query looks up."""

MOST_NAMED = 1000
"""The most cases whose source is looked up in the halves because it is not a given database."""


class Cases:
    """Collects cases of rows."""

    def __init__(
        self,
        spark: SparkSession,
        inputs: Inputs,
        groups: Groups,
        *,
        inbox_groups: frozenset[str],
        topics: Mapping[int, str],
        producer_groups: Mapping[int, str],
        from_us: int = 0,
    ) -> None:
        """`topics` and `producer_groups`: names by the hashes in rows. `from_us`: the time of the oldest id that is
        read, in microseconds since 1970."""
        self._from_us = from_us
        self._spark = spark
        self._inputs = inputs
        self._groups = groups
        self._inbox_groups = inbox_groups
        self._topics = topics
        self._producer_groups = producer_groups
        self._sources = [database.source_id() for database in inputs.databases]

    def collect(self, rows: DataFrame, all_counts: Mapping[str, int]) -> list[Found]:
        """The cases, with their evidence. `all_counts`: the number of messages of each class.

        One query collects the classes of which all cases fit. Each other class has a query of its own.
        """
        counts = {name: count for name, count in all_counts.items() if count and name != "PENDING"}
        named = {name for name in counts if BY_NAME[name].is_bad or name == "LEFT_OUT"}
        most = {name: searches.MOST_FINDINGS if name in named else 1000 for name in counts}
        whole = [name for name, count in counts.items() if count <= most[name]]
        cases: dict[str, list[Found]] = {name: [] for name in counts}
        if whole:
            for row in rows.where(findings.has(*whole)).collect():
                evidence = row.asDict()
                for name in whole:
                    if evidence["classes"] & findings.bit_of(name):
                        cases[name].append(self._found(name, dict(evidence)))
        for name in counts.keys() - set(whole):
            part = rows.where(findings.has(name)).limit(most[name])
            cases[name] = [self._found(name, row.asDict()) for row in part.collect()]
        collected = [case for cases_of_class in cases.values() for case in cases_of_class]
        self._name_sources([case for case in collected if case.evidence["sent_from"] == NOT_GIVEN][:MOST_NAMED])
        return collected

    def _found(self, name: str, row: dict[str, Any]) -> Found:
        case = Found(name, ids.to_text(bytes(row["id"])), row["no"], at_us=row["event_us"])
        case.topic = self._topics.get(row["topic"], "")
        case.producer_group = self._producer_groups.get(row["producer_group"], "")
        state = row["t_state"]
        row["local"] = (state or 0) & 3
        if state is not None:
            case.database = self._inputs.databases[state // message_rows.DATABASE].name
        if row["place"] is not None:
            number, _, case.queue = message_rows.parts_of_place(row["place"])
            case.offset = row["offset"]
            if number < len(self._inputs.logs):
                case.log = self._inputs.logs[number].name
        case.groups = groups_of(name, row, self._groups, self._inbox_groups)
        if name == "LEFT_OUT":
            case.left = self._left(row, case.groups)
        case.detail = detail(name, row, case)
        times = ("t_us", "half_us", "due_us", "queued_us", "acked_us", "effect_us")
        case.evidence = {key: row[key] for key in times if row[key] is not None}
        case.evidence |= {
            "local": LOCAL.get(row["local"], "no row"),
            "server": STATES.get(row["outcomes"], "PREPARED" if row["half_us"] else "unknown"),
            "producer_group": case.producer_group,
            "sent_from": self._origin(row["origin"]),
            "source": self._source(row["origin"]),
            "mode": "" if state is None else "outbox" if state & message_rows.OUTBOX else "half",
        }
        return case

    def _left(self, row: dict[str, Any], groups: Sequence[str]) -> tuple[Left, ...]:
        """For each group, what the message left its queue by: the last change, if it came back in between."""
        number, topic, queue = message_rows.parts_of_place(row["place"])
        inputs: list[LogInput | KafkaInput] = [*self._inputs.logs, *self._inputs.kafka]
        several = inputs[number].left[topic, queue]
        held = {each.group: each for each in several if each.holds(row["offset"], row["queued_us"])}
        return tuple(held[group] for group in groups)

    def _origin(self, number: int | None) -> str:
        """The name of the database that a half came from; "" if the database is not known."""
        if number is None:
            return ""
        return NOT_GIVEN if number == message_rows.ABROAD else self._inputs.databases[number].name

    def _source(self, number: int | None) -> str:
        """The id of the database that a half came from; "" if it is not known, or not yet (see `_name_sources`)."""
        return "" if number is None or number == message_rows.ABROAD else self._sources[number]

    def _name_sources(self, cases: Sequence[Found]) -> None:
        """Add to the evidence the ids of databases that were not given; the halves have them."""
        for log in self._inputs.logs if cases else ():
            names = {name_hash(source): source for source in log.sent()}
            rows = log.messages_of([ids.from_text(case.transaction_id) for case in cases])
            of_message = {(ids.to_text(row["id"]), row["no"]): row["source"] for row in rows if row["source"]}
            for case in cases:
                if source := names.get(of_message.get((case.transaction_id, case.message_no), 0)):
                    case.evidence["source"] = source
                    if source in self._sources:  # the database was given, but has no local rows
                        case.evidence["sent_from"] = self._inputs.databases[self._sources.index(source)].name

    def came_later(self, cases: Sequence[Found]) -> list[Found]:
        """The cases LOST whose messages were published after the part of Kafka's topics that was read.

        These messages are not lost.
        """
        cut = [kafka for kafka in self._inputs.kafka if kafka.is_cut]
        lost = {(ids.from_text(case.transaction_id), case.message_no): case for case in cases if case.finding == "LOST"}
        if not cut or not lost:
            return []
        wanted = F.broadcast(small_table(self._spark, {"id": pa.binary(), "no": pa.int32()}, lost))
        later = {
            (bytes(row["id"]), row["no"])
            for kafka in cut
            for row in kafka.later(self._spark).join(wanted, ["id", "no"]).select("id", "no").distinct().collect()
        }
        return [case for key, case in lost.items() if key in later]

    def put_right(self, cases: Sequence[Found]) -> list[Found]:
        """The cases, with MISDATED instead of ACKED_NO_EFFECT if the inbox rows exist but are dated before the times
        that were read."""
        wanted: dict[str, list[str]] = {}
        for case in cases:
            if case.finding == "ACKED_NO_EFFECT":
                for group in case.groups:
                    wanted.setdefault(group, []).append(case.message_id)
        written: dict[tuple[str, str], tuple[str, int]] = {}
        for group, message_ids in wanted.items():
            for database in self._inputs.databases:
                for first in range(0, len(message_ids), ROWS_A_QUERY):
                    for message, at_us in _effects_of(database, group, message_ids[first : first + ROWS_A_QUERY]):
                        transaction, _ = ids.parse_message_id(message)
                        if at_us < ids.milliseconds(transaction) * 1000 - SKEW_US:
                            written[group, message] = database.name, at_us
        corrected = []
        for case in cases:
            if case.finding == "ACKED_NO_EFFECT" and all((group, case.message_id) in written for group in case.groups):
                name, at_us = written[case.groups[0], case.message_id]
                text = f"the inbox row of {case.groups[0]} is dated {instant_text(at_us)}, before the message was made"
                evidence = case.evidence | {"effect_us": at_us}
                case = replace(case, finding="MISDATED", detail=text, database=name, evidence=evidence)
            corrected.append(case)
        return corrected

    def mark_repaired(self, cases: Sequence[Found]) -> Counter[str]:
        """Mark the cases that were repaired. Returns their number by class.

        A repair sends the message again, under an id that follows from the id of the original. A case is repaired if
        that id is in a queue.
        """
        by_id: dict[bytes, list[Found]] = {}
        for case in cases:
            if not case.transaction_id:
                continue
            transaction = ids.from_text(case.transaction_id)
            salts: list[bytes] = []
            if case.finding in ("LOST", "CONFLICT") and case.evidence["local"] == "COMMITTED":
                salts = [ids.republished(case.message_no)]
            elif case.finding == "ACKED_NO_EFFECT":
                salts = [ids.redelivered(group, case.message_no) for group in case.groups]
            for salt in salts:
                by_id.setdefault(ids.derived(transaction, salt), []).append(case)
        if not by_id:
            return Counter()
        # No finding concerns a message from before `from_us`, so its repair was queued after that.
        in_queues = queued_among(self._spark, self._inputs, by_id, self._from_us)
        for repair_id, cases_of_id in by_id.items():
            for case in cases_of_id:
                case.evidence["repairs"] = case.evidence.get("repairs", 0) + (repair_id in in_queues)
        repaired: Counter[str] = Counter()
        for case in cases:
            wanted_repairs = len(case.groups) if case.finding == "ACKED_NO_EFFECT" else 1
            if case.evidence.pop("repairs", 0) == wanted_repairs:
                case.evidence["repaired"] = True
                repaired[case.finding] += 1
        return repaired


def queued_among(spark: SparkSession, inputs: Inputs, transactions: Iterable[bytes], from_us: int) -> set[bytes]:
    """Those of some transactions that have messages in a queue; none of them was queued before `from_us`."""
    wanted = F.broadcast(small_table(spark, {"id": pa.binary()}, [(transaction,) for transaction in transactions]))
    tables = [log.queued_ids(spark, from_us) for log in inputs.logs]
    for kafka in inputs.kafka:
        queued = [kafka.queued(spark), *([kafka.later(spark)] if kafka.is_cut else [])]
        tables += [table.where(F.col("offset").isNotNull()).select("id") for table in queued]
    in_queues: set[bytes] = set()
    for table in tables:
        if table is not None:
            in_queues |= {bytes(row["id"]) for row in table.join(wanted, "id").distinct().collect()}
    return in_queues


def _effects_of(database: Database, group: str, message_ids: Sequence[str]) -> list[tuple[str, int]]:
    """The ids of the messages that have an inbox row of the group, and when each row was written."""
    if notify_inbox.name not in database.tables:
        return []
    columns = notify_inbox.c
    at_us = sa.literal_column(Expressions(database.kind).microseconds("created_at"), sa.BigInteger())
    query = sa.select(columns.message_id, at_us)
    query = query.where(columns.consumer_group == group, columns.message_id.in_(message_ids))
    with database.reading() as connection:
        return [(str(message_id), us or 0) for message_id, us in connection.execute(query)]
