"""The figures of equal slots, as the report has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from notify.spark.digest.comparison import Equal


def figures_of(equal: list[Equal], bucket_us: int) -> list[dict[str, Any]]:
    """Figures by bucket and topic, as spark.measures.count has them. Those of a slot are spread over its time."""
    buckets: dict[tuple[int, str], dict[str, Any]] = {}
    for known in equal:
        first, last = known.low_us // bucket_us, known.high_us // bucket_us
        length_us = known.high_us - known.low_us + 1
        for topic, figures in known.topics.items():
            spread = dict.fromkeys(figures, 0)
            for number in range(first, last + 1):
                passed_us = min(known.high_us + 1, (number + 1) * bucket_us) - known.low_us
                key = (number * bucket_us, topic)
                bucket = buckets.setdefault(key, {"at_us": key[0], "topic": topic, "newest_row_us": 0})
                if figures["rows"]:
                    newest_us = min(known.high_us, key[0] + bucket_us - 1)
                    bucket["newest_row_us"] = max(bucket["newest_row_us"], newest_us)
                for name, count in figures.items():
                    so_far = count * passed_us // length_us
                    bucket[name] = bucket.get(name, 0) + so_far - spread[name]
                    spread[name] = so_far
    return list(buckets.values())


def latencies_of(equal: list[Equal], bucket_us: int) -> list[tuple[int, str, int, int]]:
    """Rows of (bucket, topic, bin, messages) of the time from a queue to the last acknowledgement."""
    counted: Counter[tuple[int, str, int]] = Counter()
    for known in equal:
        at_us = known.low_us // bucket_us * bucket_us
        for (topic, number), count in known.bins.items():
            counted[at_us, topic, number] += count
    return sorted((*key, count) for key, count in counted.items())
