"""Commands for a cause, to copy: with the names of its groups and messages, and the flags of this audit."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from notify.spark.causes.stretches import Stretch
from notify.spark.causes.subjects import GROUP, Subject
from notify.spark.judge.findings import BY_NAME
from notify.spark.times import instant_text

PLAN_FILE = "plan.json"
REASON = "after an audit"
BEFORE_US = 60_000_000
"""How long before the first missing message a backfill begins."""


@dataclass(frozen=True)
class Commands:
    """The flags of the audit, as words."""

    inputs: tuple[str, ...] = ()
    """Those that name databases, logs and Kafka."""
    times: tuple[str, ...] = ()
    """Those that say how long things may take, and what proves effects."""
    bounds: tuple[str, ...] = ()
    """Those that say which transactions are audited."""
    server: tuple[str, ...] = ()
    """Those that name the server."""
    databases: tuple[tuple[str, str, str], ...] = ()
    """The id of each database (as bridges name their sources by default), its URL, and the schema that a flag named."""
    kafka: str = ""
    """The URL of Kafka, if that has the queues: nothing is planned there."""

    def of(self, subject: Subject, stretch: Stretch) -> tuple[str, ...]:
        """For a cause, in the order in which to run them."""
        name = subject.finding
        first = next((case.message_id for _, case in stretch.cases if case.message_id), "")
        lines: list[str] = []
        if subject.kind == GROUP and subject.name:
            lines += self._of_group(subject)
        if name == "IN_DOUBT" and subject.name:
            lines.append(self._line("transaction", "list", "--producer-group", subject.name, *self.server))
        if first:
            lines.append(self._line("audit", "explain", first, *self.inputs, *self.times))
        if BY_NAME[name].repair and not self.kafka:
            lines.append(self._audit("--plan", PLAN_FILE))
        if name == "LOST" and self.kafka:
            lines += self._backfill("", stretch.from_us - BEFORE_US)
        if name == "BRIDGE_GAP":
            lines.append(self._line("node", "bridges", *self.server))
            since_us = min(case.evidence.get("from_us", at_us - BEFORE_US) for at_us, case in stretch.cases)
            lines += self._backfill(subject.name, since_us)
        return tuple(lines)

    def _backfill(self, source: str, since_us: int) -> list[str]:
        """Take from the table of a source again what came since an instant; nothing if its URL is not known."""
        own = [database for database in self.databases if database[0] == source] or self.databases
        if len(own) != 1:
            return []
        _, url, schema = own[0]
        dsn = f"{source}={url}" if source else url
        in_schema = ("--schema", schema) if schema else ()
        to = ("--url", self.kafka) if self.kafka else self.server
        return [
            self._line(
                "bridge", "--dsn", dsn, *in_schema, "--backfill-from", instant_text(since_us).replace(" ", "T"), *to
            )
        ]

    def again(self) -> tuple[str, ...]:
        """The same audit, once its inputs are put right."""
        return (self._audit(),) if self.inputs else ()

    def _audit(self, *more: str) -> str:
        return self._line("audit", "run", *self.inputs, *self.times, *self.bounds, *more)

    def _of_group(self, subject: Subject) -> list[str]:
        if subject.finding in ("UNDELIVERED", "DISORDER", "REDELIVERED", "LEFT_OUT"):
            return [self._line("group", "show", subject.name, *self.server)]
        if subject.finding == "DEAD":
            redrive = ("dead-letter", "redrive", subject.name, "--all", "--reason", REASON, *self.server)
            return [
                self._line("dead-letter", "list", subject.name, *self.server),
                self._line(*redrive, "--dry-run"),
                self._line(*redrive),
            ]
        return []

    @staticmethod
    def _line(*words: str) -> str:
        return shlex.join(("notify", *words))
