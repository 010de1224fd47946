"""Counts, by the masks of a message's row, the consumer groups for which something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.judge.message_rows import PROVEN, Groups, mask, took_effect, without


def counts_of_groups(
    groups: Groups, inbox_groups: Collection[str], inbox_from_us: int, inbox_until_us: int
) -> dict[str, Column]:
    """The columns of these counts, by name.

    `inbox_groups`: the groups whose inbox was read. Inbox rows from before `inbox_from_us` (microseconds since 1970)
    may have been purged. A copy of a database may not have inbox rows from `inbox_until_us` on yet (0: it has all).
    """

    def count(mask_of: Callable[[int], Column]) -> Column:
        return reduce(lambda a, b: a + b, [F.bit_count(mask_of(block)) for block in range(groups.blocks)])

    def with_inbox(block: int) -> Column:
        return F.lit(groups.mask(sorted(inbox_groups), block)).cast("bigint")

    def strange(block: int) -> Column:
        receivers = [mask(name, block) for name in ("expected", "settled", "attempted")]
        receivers.append(F.coalesce(F.col(f"readers{block}"), F.lit(-1).cast("bigint")))  # null: not known
        return mask("effects", block).bitwiseAND(F.bitwise_not(reduce(Column.bitwiseOR, receivers)))

    def judged(block: int) -> Column:
        return with_inbox(block).bitwiseAND(F.bitwise_not(mask("before_inbox", block)))

    def effectless_of(block: int) -> Column:
        lacking = mask("acked", block).bitwiseAND(F.bitwise_not(took_effect(groups, block)))
        return lacking.bitwiseAND(judged(block))

    def unguarded_of(block: int) -> Column:
        return without("acked", "effects", block).bitwiseAND(mask(PROVEN, block)).bitwiseAND(judged(block))

    effectless = count(effectless_of)
    # The inbox has no rows from before its last purge, so older acknowledgements prove nothing. Kafka does not say when
    # a message was acknowledged; the time at which the message got into its queue is a lower bound.
    acked_in_time = F.coalesce("acked_us", "queued_us") >= inbox_from_us
    unseen = F.coalesce("last_acked_us", F.lit(inbox_until_us)) >= inbox_until_us if inbox_until_us else F.lit(False)
    return {
        "missing_groups": count(lambda block: without("expected", "settled", block)),
        "effectless_groups": F.when(acked_in_time & ~unseen, effectless).otherwise(0),
        "unseen_groups": F.when(acked_in_time & unseen, effectless).otherwise(0),
        "unguarded_groups": (
            F.when(acked_in_time & ~unseen, count(unguarded_of)).otherwise(0) if PROVEN in groups.masks else F.lit(0)
        ),
        "left_groups": count(lambda block: mask("left", block)),
        "attempted_groups": count(lambda block: mask("attempted", block)),
        "effect_groups": count(lambda block: mask("effects", block)),
        "strange_groups": F.when(F.col("place").isNotNull(), count(strange)).otherwise(0),
    }
