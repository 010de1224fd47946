"""/livez and /readyz. A server is healthy while it makes progress, not because its port answers."""

from __future__ import annotations

from notify.protocol.wire import JSON, encode_json
from notify.server.data.answer import Answer
from notify.server.running import Running

STALLED_US = 10_000_000


def answer(running: Running | None, path: str) -> Answer:
    """The answer to one of PROBES: 200 or 503, and one word in JSON. `running` is None before the start."""
    if path == "/livez":
        # 503 if the core makes no progress.
        if running is not None and running.core.clock() - running.core.ticked_us > STALLED_US:
            return _status(503, "stalled")
        return _status(200, "live")
    if running is None:
        return _status(503, "starting", retry_after=1)
    if running.workers is not None and running.workers.away:
        return _status(503, "starting", retry_after=1, waits_for=", ".join(running.workers.away))
    return _status(200, "ready", shard=running.core.settings.shard)


def _status(status: int, word: str, retry_after: int = 0, **more: str) -> Answer:
    return Answer(status, JSON, encode_json({"status": word} | more), retry_after)
