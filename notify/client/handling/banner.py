"""The first and last log lines of a consumer: what it receives, where from and as whom; and what its stop waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from notify.client.handling.handlers import Handler
from notify.runtime.program_log import ProgramLog


def begun(
    place: str, group: str, instance: str, handlers: Iterable[Handler], answers: Mapping[str, Mapping[str, Any]]
) -> str:
    """The text for one server. `answers`: its answer about each topic's subscription; an older server says less."""
    lines = [f"consumer of group {group} ({instance}) receives from {place}"]
    for handler in handlers:
        lines.append(f"  {handler.topic}: {', '.join(_describe(handler, answers.get(handler.topic, {})))}")
    return "\n".join(lines)


def _describe(handler: Handler, answer: Mapping[str, Any]) -> Iterable[str]:
    yield handler.mode
    if handler.batch is not None:
        yield f"in batches of {handler.batch}"
    if handler.tags:
        yield "tags " + " ".join(handler.tags)
    if handler.filter:
        yield "with a filter"
    if answer.get("made_topic"):
        yield "the topic did not exist and was made just now (is its name right?)"
    if answer.get("is_new"):
        start = handler.start.isoformat() if isinstance(handler.start, datetime) else handler.start
        yield f"a new subscription that begins at {'latest' if start is None else start}"
    if "topics" in answer:
        topics = len(answer["topics"])
        yield "1 topic meets the pattern" if topics == 1 else f"{topics} topics meet the pattern"
    if "lag" in answer:
        yield "1 message waits" if answer["lag"] == 1 else f"{answer['lag']:,} messages wait"


def stopping_text(drain: float, under_way: int) -> str:
    """The text for a consumer that stops while handlers are running. `under_way`: the number of their messages."""
    return (
        f"the consumer stops: it waits for handlers for {drain:g} s at most (the setting drain); messages under way: "
        f"{under_way}"
    )


def announce(log: ProgramLog, text: str, *, is_seen: bool) -> None:
    """Log the text. If the program has set up no logging, and `is_seen` says that a person may read it, write it to
    stderr too."""
    log.info("%s", text)
    if is_seen and not log.hasHandlers():
        sys.stderr.write(text + "\n")


def warn_of_broadcasts(log: ProgramLog, handlers: Iterable[Handler], instance: str) -> None:
    """Warn if topics are broadcast to an instance whose name is generated at each start: it misses messages."""
    topics = [handler.topic for handler in handlers if handler.mode == "broadcast"]
    if topics:
        log.warning(
            "%s: broadcast to %s, a name that no later start will have: messages sent between two runs are missed; "
            "give this consumer an instance= that stays the same",
            ", ".join(topics),
            instance,
        )
