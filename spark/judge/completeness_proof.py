"""The proof that an audit read everything: each input is compared with what the other inputs say about it.

Halves in a log name the database that they came from, and subscriptions say whether their consumers keep an inbox. The
audit therefore notices a table that was wiped or a database that was not given, and is then inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations

from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest
from notify.runtime.visible import first_of
from notify.spark.inputs.catalog import Subscribed
from notify.spark.inputs.columns import source_of
from notify.spark.inputs.databases import Database
from notify.spark.inputs.ranges import Span, id_at
from notify.spark.inputs.shards import missing_storages, movers_of, shard_of
from notify.spark.judge.terms import SKEW_US
from notify.spark.result import Covered, Inputs, Result
from notify.spark.times import instant_text

MOST_LISTED = 100
"""The most sources, and the most groups, with a row in the table of coverage; the others are checked, too."""
_NAMED = 20
MANY = 10
"""If no log has any message of a database, this many committed messages show that a log is missing."""


def refuse_doubled(inputs: Inputs) -> None:
    """Raises InvalidRequest if two inputs are the same: everything in them would be counted twice."""
    for first_log, second_log in combinations(inputs.logs, 2):
        if {s.identity for s in first_log.segments} & {s.identity for s in second_log.segments}:
            raise InvalidRequest(
                f"--log {first_log.files.place} and --log {second_log.files.place} are the same log, or copies of it: "
                "give it once"
            )
    for first, second in combinations(inputs.databases, 2):
        source = first.source_id()
        if source and source == second.source_id():
            raise InvalidRequest(
                f"the databases {first.name} and {second.name} have the same source id {source}: they are the same "
                "database, or one is a copy of the other. Give it once; a copy that producers use needs its own id"
            )
        if not source and (first.address.url, first.schema) == (second.address.url, second.schema):
            raise InvalidRequest(f"the databases {first.name} and {second.name} are the same one: give it once")
    for first, second in combinations(inputs.storages, 2):
        shard = shard_of(first)
        if shard is not None and shard == shard_of(second):
            raise InvalidRequest(
                f"the storages {first.name} and {second.name} are the same, or one is a copy of the other (shard "
                f"{shard.name}): give it once"
            )
    if len(inputs.kafka) > 1:
        clusters = [(kafka.cluster_id(), kafka) for kafka in inputs.kafka]
        for (first_id, first_kafka), (second_id, second_kafka) in combinations(clusters, 2):
            if first_id == second_id:
                raise InvalidRequest(
                    f"--kafka {first_kafka.brokers} and --kafka {second_kafka.brokers} are one cluster: give it once"
                )


def refuse_foreign(inputs: Inputs) -> None:
    """Raises InvalidRequest if a log has halves but no half came from a given database or storage."""
    input_sources = {source for database in inputs.databases if (source := database.source_id())}
    if input_sources:
        input_sources |= movers_of(inputs).keys()
    for log in inputs.logs:
        sources = set(log.sent())
        if input_sources and sources and not sources & input_sources:
            listed = [_with_groups(source, groups) for source, groups in sorted(log.sent().items())]
            raise InvalidRequest(
                f"the log {log.name} and the databases do not belong together: its halves came from {_list(listed)}, "
                f"and the databases are {_list(sorted(input_sources))}. Name the database with --database, or with "
                "--storage if servers keep halves in it, or the log that belongs to these databases with --log"
            )


class Proof:
    """Compares the inputs with what the audit should have, and notes the differences in the result."""

    def __init__(self, inputs: Inputs, result: Result, from_us: int, to_us: int, slack_us: int = SKEW_US) -> None:
        """`from_us`, `to_us`: the audited range, microseconds since 1970. `slack_us`: the longest time between the
        instants of a message."""
        self._inputs = inputs
        self._result = result
        self._from_us = from_us
        self._to_us = to_us
        self._slack_us = slack_us
        self._by_source = {source: database for database in inputs.databases if (source := database.source_id())}
        self._movers = movers_of(inputs)

    def of_logs(self) -> None:
        """Note how much of each log and of Kafka was read."""
        for log in self._inputs.logs:
            expected = f"bytes {log.dropped_to} to {max((facts.end for facts in log.facts), default=0)}"
            if log.dropped_to:
                expected += f", after those that retention dropped (until {instant_text(log.first_us)})"
            unread = sum(hole.end - hole.start for hole in log.holes)
            read = sum(facts.end - facts.base for facts in log.facts) - unread
            detail = f"{read} bytes in {len(log.facts)} segments, {len(log.holes)} unreadable parts"
            is_whole = not log.problems and not any(log.unread(self._from_us - self._slack_us))
            self._add(f"log {log.name}", "segments", expected, detail, is_whole=is_whole)
        for kafka in self._inputs.kafka:
            self._add(
                kafka.name, "partitions", f"{kafka.partitions} of {len(kafka.topics)} topics", f"{kafka.count} records",
                is_whole=True,
            )  # fmt: skip

    def of_sources(self) -> dict[str, int | None]:
        """Note the databases that the halves came from.

        Returns the number of each database with local rows, by its source id. None: the id belongs to a bridge or relay
        of a storage, whose messages may be from any database.
        """
        numbers: dict[str, int | None] = dict.fromkeys(self._movers)
        for number, database in enumerate(self._inputs.databases):
            if (source := database.source_id()) and database.has_rows(half_message):
                numbers[source] = number
            if half_message.name in database.tables and not database.has_digests:
                self._add(
                    f"database {database.name}", "digests", "a digest of each body",
                    "the table has none: altered bodies are not found (create_tables adds the column)", is_whole=False,
                )  # fmt: skip
        senders = {f"log {log.name}": log.sent(self._from_us) for log in self._inputs.logs}
        span = Span(self._from_us, self._to_us)
        senders |= {f"storage {storage.name}": storage.sent(span) for storage in self._inputs.storages}
        with self._bounded("source"):
            for name, sent in senders.items():
                for source, groups in sorted(sent.items()):
                    self._of_source(name, source, groups, is_read=source in numbers)
        return numbers

    def of_storages(self) -> bool:
        """Note the storages that were not given. Returns whether there are any."""
        return missing_storages(self._inputs, self._result, self._from_us, self._to_us)

    def strangers(self) -> frozenset[int]:
        """The numbers of the databases that committed messages in the range although no log ever had one of theirs."""
        inputs, logs = self._inputs, self._inputs.logs
        sources = set().union(*(log.sent() for log in logs))
        # Kafka and SQL storage keep no list of sources, and a bridge may have any name.
        if not sources or len(self._by_source) < len(inputs.databases) or inputs.kafka or inputs.storages:
            return frozenset()
        if any(not source_of(bridged.source) for log in logs for bridged in log.catalog.bridges):
            return frozenset()
        begun_us = max(log.first_us for log in logs)
        # Retention may have dropped messages whose ids are a little newer than the beginning of the log.
        span = Span(max(self._from_us, begun_us + self._slack_us if begun_us else 0), self._to_us)
        strangers = []
        for number, database in enumerate(self._inputs.databases):
            source = database.source_id()
            if source in sources or not _has_committed(database, span):
                continue
            strangers.append(number)
            self._result.reasons.append(
                f"database {database.name} ({source}) has committed messages, but no given log has a message of it: "
                "name its server's log with --log, or leave the database out"
            )
            self._add(f"database {database.name}", "source", "messages of it in a log", "none", is_whole=False)
        return frozenset(strangers)

    def _of_source(self, name: str, source: str, groups: Mapping[str, int], *, is_read: bool) -> None:
        if source in self._movers:
            expected = f"the storage of {_with_groups(source, groups)}"
            self._add(name, "source", expected, self._movers[source], is_whole=True)
            return
        database = self._by_source.get(source)
        expected = f"the database of {_with_groups(source, groups)}"
        if database is None:
            self._result.reasons.append(
                f"the {name} has committed messages of {_with_groups(source, groups)}, and no given database "
                "has this id: name it with --database, or with --storage if servers keep halves in it"
            )
        elif not is_read and max(groups.values()) > database.purged()[0] + SKEW_US:
            self._result.reasons.append(
                f"database {database.name}: half_message is empty, and the {name} has committed messages of "
                f"{_with_groups(source, groups)}: its rows were deleted, and no purge recorded it"
            )
        elif not is_read:
            is_read = True  # all rows were purged
        read = "not given" if database is None else f"database {database.name}"
        self._add(
            name, "source", expected, read if is_read or database is None else f"{read}: no row", is_whole=is_read
        )

    def of_inboxes(self, acknowledged: Iterable[str]) -> None:
        """Note whether the inboxes were read of the groups that acknowledged closed messages in the range.

        The subscription of a group says whether its consumers keep an inbox.
        """
        inbox_from_us: dict[str, int] = {}
        for log in self._inputs.logs:
            inbox_from_us |= log.inboxes()
        for kafka in self._inputs.kafka:
            inbox_from_us |= kafka.inboxes()
        silent: list[str] = []
        holders = _holders(self._inputs.databases)
        bare = sorted({f"{s.group} ({s.topic})" for s in self._without_inbox() if s.group in holders})
        if bare:
            self._result.notes.append(
                f"not checked for ACKED_NO_EFFECT, because consumers of these topics reported no inbox: {_list(bare)}"
            )
        with self._bounded("inbox"):
            for group in sorted(set(acknowledged)):
                if group in holders:
                    self._add(f"group {group}", "inbox", "an inbox", f"database {_list(holders[group])}", is_whole=True)
                elif group in inbox_from_us and inbox_from_us[group] < self._to_us:
                    self._result.reasons.append(
                        f"the consumers of group {group} have an inbox, but no given database has a row of it: name "
                        "its database with --database, or its rows were deleted"
                    )
                    self._add(f"group {group}", "inbox", "an inbox", "no row", is_whole=False)
                else:
                    silent.append(group)
                    unknown = "not known: its consumers reported none"
                    self._add(f"group {group}", "inbox", unknown, "no row", is_whole=True)
        if silent:
            self._result.notes.append(
                "not checked for ACKED_NO_EFFECT, because no given database has inbox rows of these groups and their "
                f"consumers have reported no inbox: {_list(silent)}"
            )

    def _without_inbox(self) -> Iterator[Subscribed]:
        """The subscriptions whose consumers have reported no inbox."""
        for log in self._inputs.logs:
            for subscribed in log.catalog.subscriptions.values():
                is_instance = subscribed.mode == "broadcast" or "@" in subscribed.group
                if subscribed.inbox_from_us < 0 and not is_instance:
                    yield subscribed

    @contextmanager
    def _bounded(self, kind: str) -> Iterator[None]:
        """Keep a bounded number of the lines and reasons that are added inside; the others are only counted."""
        coverage, reasons = self._result.coverage, self._result.reasons
        first, begin = len(coverage), len(reasons)
        yield
        added = sorted(coverage[first:], key=lambda line: line.is_whole)  # missing inputs come first
        if len(added) > MOST_LISTED:
            unlisted = added[MOST_LISTED:]
            is_whole = all(line.is_whole for line in unlisted)
            rest = Covered(f"{len(unlisted)} more", kind, "as above", "as above", is_whole)
            coverage[first:] = [*added[:MOST_LISTED], rest]
        if len(reasons) - begin > _NAMED:
            more = len(reasons) - begin - _NAMED
            reasons[begin + _NAMED :] = [f"{more} more reasons like the one before"]

    def _add(self, name: str, kind: str, expected: str, read: str, *, is_whole: bool) -> None:
        self._result.coverage.append(Covered(name, kind, expected, read, is_whole))


def _holders(databases: Sequence[Database]) -> dict[str, list[str]]:
    """The databases that have inbox rows of each group."""
    holders: dict[str, list[str]] = {}
    for database in databases:
        for group in database.inbox_groups():
            holders.setdefault(group, []).append(database.name)
    return holders


def _has_committed(database: Database, span: Span) -> bool:
    """Whether at least MANY local rows of committed transactions were made in a span."""
    if half_message.name not in database.tables:
        return False
    ids = f"transaction_id >= '{id_at(span.start_us)}' AND transaction_id < '{id_at(span.end_us)}'"
    query = f"SELECT 1 FROM {database.in_schema(half_message.name)} WHERE {ids} AND state = 'COMMITTED' LIMIT {MANY}"
    return len(database.rows(query)) == MANY


def _with_groups(source: str, groups: Iterable[str]) -> str:
    named = [group for group in sorted(groups) if group]
    return f"{source} (producer groups {_list(named)})" if named else source


_list = partial(first_of, most=_NAMED)
