"""Which messages were delivered, and took effect, within the time that they were to be: columns of a message's row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.columns import COMMITTED
from notify.spark.life import Groups, mask, without
from notify.spark.log_input import LogInput
from notify.spark.result import Inputs

COUNTED = ("due", "delivered", "effective")
"""Counts of committed messages: whose time is over; of them, those delivered in time; of them, those with all their
effects."""


@dataclass(frozen=True)
class InTime:
    """The bounds. Instants and durations are in microseconds, instants since 1970."""

    settled_before_us: int
    """Messages that were to be delivered before this should be settled."""
    deliver_us: int
    """The time from a message's place in a queue to its last acknowledgement."""
    joined_us: int
    """When the newest subscription was made. A group that begins with old messages does not make them late: of those
    queued before, the first acknowledgement counts."""
    inbox_from_us: int
    """Inbox rows from before this may have been purged."""
    with_inbox: frozenset[str]
    """Consumer groups whose inbox was read."""
    with_filter: frozenset[str]
    """Those whose subscriptions leave messages out: what they skipped has no effect rightly."""
    inbox_until_us: int = 0
    """Inbox rows from this instant on may not have come to a copy of their database yet; 0: all have."""

    def counts(self, groups: Groups) -> dict[str, Column]:
        """The aggregates COUNTED over rows of spark.rows.MessageRows."""
        is_committed = F.col("t_state").bitwiseAND(3) == COMMITTED
        due = is_committed & F.col("is_closed") & self.is_due("event_us")
        queued = F.col("place").isNotNull()
        settled = reduce(Column.__and__, [_none(without("expected", "settled", b)) for b in range(groups.blocks)])
        delivered = due & queued & settled & self.is_prompt()
        is_known = F.coalesce("acked_us", "queued_us") >= self.inbox_from_us
        if self.inbox_until_us:
            is_known &= F.coalesce("last_acked_us", F.lit(self.inbox_until_us)) < self.inbox_until_us
        effects = reduce(Column.__and__, [_none(self._effectless(groups, b)) for b in range(groups.blocks)])
        return {
            "due": F.count_if(due),
            "delivered": F.count_if(delivered),
            "effective": F.count_if(delivered & (effects | ~is_known)),
        }

    def is_due(self, event_us: str) -> Column:
        """Whether a message should be settled; `event_us`: the time of one that is in no queue."""
        return F.coalesce("due_us", "queued_us", event_us) < self.settled_before_us

    def is_prompt(self) -> Column:
        """Whether a message in a queue was acknowledged in time, if it was."""
        acked = F.when(F.col("queued_us") < self.joined_us, F.col("acked_us")).otherwise(F.col("last_acked_us"))
        # Kafka says who acknowledged a message, and not when.
        took_us = F.coalesce(acked - F.greatest("queued_us", F.coalesce("due_us", "queued_us")), F.lit(0))
        return took_us <= self.deliver_us

    def _effectless(self, groups: Groups, block: int) -> Column:
        """The groups of a block that kept an inbox by then and lack the message there."""
        inboxes, filters = (
            groups.mask(sorted(names & set(groups.names)), block) for names in (self.with_inbox, self.with_filter)
        )
        # A group without a filter should have the effect whatever it did: a dead letter has none.
        expected = mask("expected", block).bitwiseAND(F.lit(inboxes & ~filters).cast("bigint"))
        acked = mask("acked", block).bitwiseAND(F.lit(inboxes).cast("bigint"))
        known = mask("effects", block).bitwiseOR(mask("before_inbox", block))
        return expected.bitwiseOR(acked).bitwiseAND(F.bitwise_not(known))


def filtered(inputs: Inputs) -> frozenset[str]:
    """The groups with a subscription that leaves messages out."""
    names = {s.group for log in inputs.logs for s in log.catalog.subscriptions.values() if s.is_filtered}
    for kafka in inputs.kafka:
        names |= {group for (group, _), s in kafka.progress.subscribed.items() if s.filter or s.tags}
    return frozenset(names)


def joined_us(logs: Iterable[LogInput]) -> int:
    """When the newest subscription of the logs was made; 0: before what is retained."""
    return max((s.since_us for log in logs for s in log.catalog.subscriptions.values()), default=0)


def _none(mask: Column) -> Column:
    return mask == 0
