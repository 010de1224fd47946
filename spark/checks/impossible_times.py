"""Rows with impossible times, even if clocks differ: they are dated before their message was made, or too late."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.judge.message_rows import Groups


def is_misdated(slack_us: int, groups: Groups) -> Column:
    """Whether a row has an impossible time.

    A local row and a half are written when the id is made; an inbox row is written later, but before its group
    acknowledges the message. `slack_us`: the longest time by which clocks and a transaction may separate these times.
    """
    t_us, half_us, effect_us, made_us = (F.col(name) for name in ("t_us", "half_us", "effect_us", "made_us"))
    off_us = F.greatest(F.abs(t_us - made_us), F.abs(half_us - made_us), made_us - effect_us)
    acked = [F.coalesce(F.col(f"acked{b}").bitwiseAND(F.col(f"effects{b}")), F.lit(0)) for b in range(groups.blocks)]
    is_acked = reduce(Column.__or__, [both != 0 for both in acked])
    is_late = is_acked & (effect_us - F.col("last_acked_us") > slack_us)
    return F.coalesce(off_us > slack_us, F.lit(False)) | F.coalesce(is_late, F.lit(False))
