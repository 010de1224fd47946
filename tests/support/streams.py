"""Streams of messages into tables, as tests run them on Spark."""

from __future__ import annotations

import json
from typing import Any

from tests.support.http import admin, call

CONNECTS = 5
"""Spark gives the process that plans a stream 10 seconds to start, which a loaded machine may not keep."""


def send(url: str, topic: str, first: int, end: int) -> None:
    """Send messages with the numbers [first, end)."""
    messages = [
        {"topic": topic, "key": f"k{n % 5}", "tag": "t", "headers": {"n": str(n)}, "body": json.dumps({"n": n})}
        for n in range(first, end)
    ]
    call(url, "POST", "/v1/messages", {"messages": messages})


def make(url: str, topic: str, queues: int) -> str:
    """Make a topic; its name."""
    admin(url, "PUT", f"topics/{topic}", {"queues": queues})
    return topic


def run_to_its_end(writing: Any) -> None:
    """Run a query over what is available now. Raises what it fails with."""
    for attempt in range(CONNECTS):
        query = writing.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            return
        except Exception as error:
            if "failed to connect back" not in str(error) or attempt == CONNECTS - 1:
                raise
        finally:
            query.stop()
