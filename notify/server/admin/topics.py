"""Admin routes of topics: list, show, make, change, purge and delete them."""

from __future__ import annotations

import heapq
from typing import Any, Literal

from fastapi import APIRouter, Depends

from notify.admin_api.declaration import Write
from notify.admin_api.queue_rows import kept, sent
from notify.admin_api.topics import PurgeTopic, TopicWrite
from notify.errors import Conflict, InvalidRequest
from notify.protocol.limits import check_between, check_name
from notify.server.admin import permission
from notify.server.admin.writes import Desk, SpanName, Who, check_no_after
from notify.server.core.core import Core
from notify.server.groups import purging
from notify.server.topics import changed, check_retry, described, policy
from notify.storage.topics import Topic

MOST_SORTED = 1000
MOST_NEWEST = 100
"""The most topics of a list whose newest message is read."""

Sort = Literal["name", "rate", "lag", "kept", "sent", "newest"]


def _check_ttl(core: Core, topic: Topic) -> None:
    """Raises InvalidRequest if a message would expire before a group's first retry."""
    if not topic.ttl_us:
        return
    for subscription in core.queues.subscriptions():
        if subscription.topic == topic.name:
            check_retry(topic.ttl_us, subscription.group, topic.name, subscription.retry_min_us)


def add_routes(routes: APIRouter, services: APIRouter, desk: Desk) -> None:
    """Add the routes under `topics`; `services` gets the route that services call with their own rights."""
    _views(routes, services, desk)
    _writes(routes, desk)


def _views(routes: APIRouter, services: APIRouter, desk: Desk) -> None:
    @routes.get("/topics")
    async def topics(
        prefix: str = "", after: str = "", max: int = 1_000_000, internal: bool = True, sort: Sort = "name"
    ) -> dict[str, Any]:
        """List topics by name: at most `max` topics whose names begin with `prefix` and come after `after`.

        Without `internal`, topics of dead letters and retries are left out. With a `sort` other than `name` the largest
        come first (`newest`: the latest message); it works for at most 1,000 topics and takes no `after`. In a list of
        up to 100 topics each one has `newest_at`.
        """
        check_between("max", max, 1, 1_000_000)
        if sort == "name":
            answer = await desk.running.queues.topics.listed(prefix, after, max, internal=internal)
        else:
            answer = await _sorted(desk, prefix, after, max, internal=internal, sort=sort)
        rows = answer["topics"]
        if len(rows) <= MOST_NEWEST:
            newest = await desk.running.queues.topics.newest_at([row["name"] for row in rows])
            rows = [row | {"newest_at": newest.get(row["name"])} for row in rows]
        to_queue = desk.running.core.metrics.latencies["commit_to_queue"]
        return answer | {
            "topics": [
                row
                | {
                    "per_second": desk.running.figures.rate(row["name"]),
                    "latency": {"commit_to_queue": to_queue.lately(row["name"])},
                }
                for row in rows
            ]
        }

    @routes.get("/topics/{name}/history")
    async def history(name: str, span: SpanName = "hour") -> dict[str, Any]:
        """Show a topic's last hour, or another span, in columns: messages sent per second, its largest lag, latency."""
        return desk.running.figures.topic(name, span)

    @services.get("/topics/{name}", dependencies=[Depends(permission.check_topic_reader)])
    async def topic(name: str) -> dict[str, Any]:
        """Show a topic: its queues with their first and next offsets, and its policy."""
        return await desk.running.queues.topics.one(name)

    @routes.get("/topics/{name}/groups")
    async def groups_of(name: str) -> dict[str, Any]:
        """List the groups that subscribe to a topic, each with its lag."""
        return {"groups": await desk.running.queues.topics.groups_of(name)}

    @routes.get("/topics/{name}/senders")
    async def senders_of(name: str) -> dict[str, Any]:
        """List the producer groups of a topic's newest 20 messages, and how many of these each one sent.

        `producer_group` is empty for messages without a transaction, or whose transaction is not known any more.
        `is_online`: a producer of the group answers checks now. `looked_at` messages since `first_at`, of at most 32
        queues, were counted; over Kafka none.
        """
        return await desk.running.queues.topics.senders_of(name)


async def _sorted(desk: Desk, prefix: str, after: str, most: int, *, internal: bool, sort: str) -> dict[str, Any]:
    """The topics with the largest figures. Raises InvalidRequest if there are more than MOST_SORTED topics."""
    check_no_after(after)
    answer = await desk.running.queues.topics.listed(prefix, "", MOST_SORTED + 1, internal=internal)
    if len(answer["topics"]) > MOST_SORTED:
        raise InvalidRequest(f"more than {MOST_SORTED} topics cannot be sorted: give a prefix", "invalid_query")

    if sort == "newest":
        newest = await desk.running.queues.topics.newest_at([row["name"] for row in answer["topics"]])
        last = heapq.nlargest(most, answer["topics"], key=lambda row: newest.get(row["name"], ""))
        return answer | {"topics": last}

    def figure(row: dict[str, Any]) -> float:
        if sort == "rate":
            return desk.running.figures.rate(row["name"]) or 0.0
        if sort == "lag":
            return float(row.get("lag") or 0)
        return float(kept(row["queues"]) if sort == "kept" else sent(row["queues"]))

    return answer | {"topics": heapq.nlargest(most, answer["topics"], key=figure)}


def _writes(routes: APIRouter, desk: Desk) -> None:
    @routes.put("/topics/{name}")
    async def put_topic(name: str, write: TopicWrite, who: Who) -> dict[str, Any]:
        """Make or change a topic; a field that is left out keeps its value, or gets its default."""
        check_name("topic", name)
        existing = desk.running.core.queues.topic(name)
        topic = changed(existing or Topic(name), write)
        if existing is not None and topic.queues < existing.queues:
            raise InvalidRequest(f"topic {name!r} has {existing.queues} queues; the number can grow, not shrink")
        _check_ttl(desk.running.core, topic)
        lag = desk.running.core.delivery.followers.lag(name)
        if topic.backlog and topic.backlog < lag:
            raise InvalidRequest(
                f"a group is {lag} messages behind in topic {name!r}: a backlog of {topic.backlog} is below what is "
                f"stored; let it catch up, reset it, or allow {lag}",
                "backlog_below_stored",
            )

        async def do() -> Any:
            desk.running.core.topics.put_soon(topic)
            await desk.running.core.queues.sync()
            return described(desk.running.core.queues, topic)

        return await desk.carry_out(write, who, "topic.put", name, do, policy(topic) | {"queue_count": topic.queues})

    @routes.delete("/topics/{name}")
    async def delete_topic(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Delete a topic with its messages and subscriptions, delivered or not."""
        topic = desk.topic(name)

        async def do() -> Any:
            await desk.running.core.delete_topic(name)
            return {"deleted": name}

        return await desk.carry_out(write, who, "topic.delete", name, do, described(desk.running.core.queues, topic))

    @routes.post("/topics/{name}/purge")
    async def purge(name: str, write: PurgeTopic, who: Who) -> dict[str, Any]:
        """Purge a topic's messages up to a point; messages that a group has not settled need `force`.

        Transactions in doubt and delayed messages are in no queue yet: they stay.
        """
        topic = desk.topic(name)
        preview = purging.preview(desk.running.core, topic, write.before)
        if preview["missed"] and not write.force and not write.dry_run:
            groups = ", ".join(f"{group} {count}" for group, count in sorted(preview["missed"].items())[:10])
            raise Conflict(
                f"groups have not settled all messages: {groups}; let them catch up, reset them, or purge with force",
                "not_settled",
            )

        async def do() -> Any:
            return await purging.drop(desk.running.core, topic, preview)

        return await desk.carry_out(write, who, "topic.purge", name, do, preview)
