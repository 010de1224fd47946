"""Which messages were delivered and took effect within the allowed time: conditions on a message's row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.inputs.columns import COMMITTED
from notify.spark.inputs.kafka_input import KafkaInput
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge.message_rows import Groups, mask, took_effect, without
from notify.spark.result import Inputs

COUNTED = ("due", "delivered", "effective")
"""The counts of committed messages: those whose time is over, of these the ones delivered in time, and of these again
the ones with all their effects."""


@dataclass(frozen=True)
class InTime:
    """The bounds, in microseconds; instants count from 1970."""

    settled_before_us: int
    """A message that was due before this instant should be settled."""
    deliver_us: int
    """The allowed time from the queueing of a message to its last acknowledgement."""
    joined_us: int
    """When the newest subscription was made. A new group that begins with old messages does not make them late: for
    messages queued before this instant the first acknowledgement counts."""
    inbox_from_us: int
    """Inbox rows from before this instant may have been purged."""
    with_inbox: frozenset[str]
    """The consumer groups whose inbox was read."""
    with_filter: frozenset[str]
    """The consumer groups with a filter: a message that they skipped rightly has no effect."""
    inbox_until_us: int = 0
    """A copy of a database may not have inbox rows from this instant on yet; 0: it has all of them."""
    choosing: frozenset[str] = frozenset()
    """The consumer groups that took only some of the messages of a queue which others left: nothing here shows whether
    a message that they never settled was one of these."""

    def counts(self, groups: Groups) -> dict[str, Column]:
        """The aggregates COUNTED over rows of spark.rows.MessageRows."""
        is_committed = F.col("t_state").bitwiseAND(3) == COMMITTED
        due = is_committed & F.col("is_closed") & self.is_due("event_us")
        queued = F.col("place").isNotNull()
        settled = reduce(Column.__and__, [_none(self._unsettled(groups, b)) for b in range(groups.blocks)])
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
        """Whether a message should be settled. `event_us`: the column with the time of messages in no queue."""
        return F.coalesce("due_us", "queued_us", event_us) < self.settled_before_us

    def is_prompt(self) -> Column:
        """Whether a message in a queue was acknowledged in time; also true if nobody knows when."""
        acked = F.when(F.col("queued_us") < self.joined_us, F.col("acked_us")).otherwise(F.col("last_acked_us"))
        # Kafka tells who acknowledged a message, but not when.
        took_us = F.coalesce(acked - F.greatest("queued_us", F.coalesce("due_us", "queued_us")), F.lit(0))
        return took_us <= self.deliver_us

    def _unsettled(self, groups: Groups, block: int) -> Column:
        """The groups of a block that are to settle the message, or never settled it before it left their queue."""
        choosing = groups.mask(sorted(self.choosing & set(groups.names)), block)
        left = mask("left", block).bitwiseAND(F.lit(~choosing).cast("bigint"))
        return without("expected", "settled", block).bitwiseOR(left)

    def _effectless(self, groups: Groups, block: int) -> Column:
        """The groups of a block whose inbox already existed and lacks the message."""
        inboxes, filters = (
            groups.mask(sorted(names & set(groups.names)), block) for names in (self.with_inbox, self.with_filter)
        )
        # A group without a filter should have the effect even if it did not acknowledge: a dead letter has no effect.
        expected = mask("expected", block).bitwiseAND(F.lit(inboxes & ~filters).cast("bigint"))
        acked = mask("acked", block).bitwiseAND(F.lit(inboxes).cast("bigint"))
        excused = took_effect(groups, block).bitwiseOR(mask("before_inbox", block))
        return expected.bitwiseOR(acked).bitwiseAND(F.bitwise_not(excused))


def filtered(inputs: Inputs) -> frozenset[str]:
    """The groups with a subscription that skips messages by tag or filter."""
    groups = {
        subscribed.group
        for log in inputs.logs
        for subscribed in log.catalog.subscriptions.values()
        if subscribed.is_filtered
    }
    for kafka in inputs.kafka:
        subscriptions = kafka.progress.subscribed.items()
        groups |= {group for (group, _), subscribed in subscriptions if subscribed.filter or subscribed.tags}
    return frozenset(groups)


def choosing(inputs: Inputs) -> frozenset[str]:
    """The groups whose subscription had tags or a filter when messages left its queue."""
    sources: list[LogInput | KafkaInput] = [*inputs.logs, *inputs.kafka]
    lefts = [left for source in sources for several in source.left.values() for left in several]
    return frozenset(left.group for left in lefts if (s := left.subscription) and (s.tags or s.filter))


def joined_us(logs: Iterable[LogInput]) -> int:
    """When the newest subscription of the logs was made; 0: before the oldest retained record."""
    return max((s.since_us for log in logs for s in log.catalog.subscriptions.values()), default=0)


def _none(mask: Column) -> Column:
    return mask == 0
