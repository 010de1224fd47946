"""The time of a message: the time of its transaction, by its row or by its id. As SQL of a message's row."""

from __future__ import annotations

from notify.spark.inputs.ranges import EPOCH_US
from notify.spark.judge.terms import Terms

MADE_US = "coalesce(CAST(conv(hex(substring(id, 1, 6)), 16, 10) AS bigint) * 1000, spark_partition_id())"
"""When a transaction's id was made, by its producer's clock: the column `made_us` that other conditions use.

There is always a value, so the partition number is never used. It only keeps Spark from repeating this long expression
in each condition that uses the column.
"""


def event_us(terms: Terms) -> str:
    """The time of a message: the time of its local row, otherwise of its half, its place in a queue, or its effect.

    If that time differs by more than `slack_us` from the time in the id, the time in the id counts: tables are read by
    ids, so that each message is in one window of time. An id with an impossible time would be in no window, so then the
    time of the row counts. Impossible times are those from `ahead_us` on, those before this software existed, and, if
    all ids are read, those before `whole_from_us` (0: not all ids are read).
    """
    at_us = "coalesce(t_us, half_us, queued_us, effect_us)"
    is_early = f"coalesce(t_us, half_us) IS NOT NULL AND made_us < {terms.whole_from_us}"
    is_odd = f"{is_early} OR made_us < {EPOCH_US} OR made_us >= {terms.ahead_us}"
    is_near = f"abs({at_us} - made_us) <= {terms.slack_us}"
    return f"CASE WHEN {is_near} OR {is_odd} THEN {at_us} WHEN {at_us} IS NOT NULL THEN made_us END"
