"""Admin routes of consumer groups: their progress, subscriptions, priorities, resets, objectives and webhooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from notify.admin_api.declaration import Write
from notify.admin_api.groups import ObjectiveWrite, PrioritiesWrite, PushWrite, Reset, SubscriptionWrite
from notify.admin_api.queue_rows import sorted_groups
from notify.errors import InvalidRequest, NotFound
from notify.protocol.limits import check_between, check_name, instant_us
from notify.protocol.wire import Subscribe
from notify.server.admin import permission
from notify.server.admin.writes import Desk, SpanName, Who, check_no_after
from notify.server.configuration.revisions import OBJECTIVES, PUSHES
from notify.server.core.objectives import MOST_OBJECTIVES, Objective
from notify.server.core.pushes import Push
from notify.server.core.subscriptions import way_shown
from notify.server.delivery.turns import ONE_CLASS
from notify.server.groups import Move, own_tenants
from notify.server.latency import IN_LISTS
from notify.storage.groups import Priorities, PriorityClass

WEIGHTS = (6, 3, 1)
"""Default weights of a group's first, second and third class."""


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    whole_from: AwareDatetime = Field(description="rows of messages committed earlier may be gone")


def _priorities(write: PrioritiesWrite) -> Priorities:
    names = [c.name for c in write.classes]
    if len(set(names)) < len(names):
        raise InvalidRequest("two classes have the same name", "invalid_priorities")
    classes = []
    for number, fields in enumerate(write.classes):
        if fields.weight is None and number >= len(WEIGHTS):
            raise InvalidRequest(
                f"class {fields.name!r} needs a weight: only the first three have a default", "invalid_priorities"
            )
        weight = WEIGHTS[number] if fields.weight is None else fields.weight
        classes.append(PriorityClass(fields.name, weight, tuple(fields.topics)))
    return Priorities(tuple(classes), dict(write.shares))


def _priorities_shown(priorities: Priorities) -> dict[str, Any]:
    classes = [{"name": c.name, "weight": c.weight, "topics": list(c.topics)} for c in priorities.classes]
    return {"classes": classes, "shares": priorities.shares}


def _objective_shown(desk: Desk, group: str) -> dict[str, Any] | None:
    """A group's objective, and what it acknowledged in the last five minutes: `count` and `met`, the share in time."""
    objective = desk.running.core.objectives.by_group.get(group)
    if objective is None:
        return None
    met = desk.running.core.objectives.met(group)
    return asdict(objective) | {"count": met.messages, "met": None if met.share is None else round(met.share, 6)}


def add_routes(routes: APIRouter, services: APIRouter, desk: Desk) -> None:
    """Add the routes `groups` and `pushes`; `services` gets the routes that services call with their own rights."""
    _views(routes, desk)
    _subscriptions(routes, services, desk)
    _writes(routes, desk)
    _objectives(routes, desk)
    _pushes(routes, desk)


Sort = Literal["name", "pain", "lag", "oldest", "in", "out", "p99", "dead_letters", "consumers"]


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/groups")
    async def groups(prefix: str = "", after: str = "", max: int = 1_000_000, sort: Sort = "name") -> dict[str, Any]:
        """List groups by name: at most `max` groups whose names begin with `prefix` and come after `after`.

        With a `sort` other than `name` the largest come first (`pain`: the groups that need an operator most); it takes
        no `after`. `latency`: how many messages the last one to two minutes had, and `p50`, `p95` and `p99` in seconds,
        of the time from commit to acknowledgement, and of the handlers. Rates and `oldest_seconds` are of the last
        minute. `is_failing`: messages became dead letters in the last one to two minutes.
        """
        check_between("max", max, 1, 1_000_000)
        running = desk.running
        if sort == "name":
            answer = await running.queues.groups.listed(prefix, after, max)
        else:
            check_no_after(after)
            answer = await running.queues.groups.listed(prefix, "", 1_000_000)
        dead = {row["group"]: row["count"] for row in await running.queues.letters.counted(prefix, 1_000_000)}
        latencies = running.core.metrics.latencies
        rows = [
            row
            | running.figures.lately(row["name"])
            | {
                "dead_letters": dead.get(row["name"], 0),
                "is_failing": running.figures.is_failing(row["name"], dead.get(row["name"], 0)),
                "latency": latencies.group(row["name"], IN_LISTS),
            }
            for row in answer["groups"]
        ]
        return answer | {"groups": sorted_groups(rows, sort, max)}

    @routes.get("/groups/{name}/history")
    async def history(name: str, span: SpanName = "hour") -> dict[str, Any]:
        """Show a group's last hour, or another span, in columns: rates, lag, oldest message, dead letters, latency.

        `settled` and `arrived` are messages per second. `commit_to_ack_p99` and the like are seconds, each minute's; of
        longer steps the highest.
        """
        return desk.running.figures.group(name, span)

    @routes.get("/groups/{name}")
    async def group(name: str) -> dict[str, Any]:
        """Show a group: subscriptions, positions and lag of its queues, leases, latency, and its instances' states."""
        latencies = desk.running.core.metrics.latencies.group(name)
        group = await desk.running.queues.groups.one(name)
        return group | {"latency": latencies, "objective": _objective_shown(desk, name)}

    @routes.get("/groups/{name}/tenants")
    async def tenants(name: str, topic: str = "", max: int = 20) -> dict[str, Any]:
        """List the tenants that wait for their turns, the one with the most waiting messages first.

        Tenants take turns under a subscription with `fair_by`. `tenant` is null for messages that name none, and for
        the tenants beyond 10,000 in a queue, which share lanes (`are_several`). Retries that are not due do not wait.
        """
        check_between("max", max, 1, own_tenants.MOST_LISTED)
        return own_tenants.listed(desk.running.core, name, topic, max)


def _subscriptions(routes: APIRouter, services: APIRouter, desk: Desk) -> None:
    @services.put("/groups/{name}/subscriptions/{topic}", dependencies=[Depends(permission.check_subscriber)])
    async def subscribe(name: str, topic: str, write: SubscriptionWrite, who: Who) -> dict[str, Any]:
        """Make or change a subscription; a topic with `*` is a pattern, which follows new topics from their start."""
        subscriptions = desk.running.core.subscriptions
        requested = Subscribe(**{field: getattr(write, field) for field in Subscribe.__struct_fields__})
        wanted = subscriptions.checked(name, topic, requested)

        async def do() -> Any:
            # Checked again: while the record was written a replay may have begun, or a consumer may have reported.
            return await subscriptions.put(subscriptions.checked(name, topic, requested), write.start, who)

        return await desk.carry_out(write, who, "subscription.put", f"{name}/{topic}", do, way_shown(wanted))

    @services.put("/groups/{name}/subscriptions/{topic}/inbox", dependencies=[Depends(permission.check_subscriber)])
    async def report_inbox(name: str, topic: str, inbox: Whole) -> dict[str, Any]:
        """Record since when a consumer's inbox has a row for each message that took effect."""
        await desk.running.core.subscriptions.report_inbox(name, topic, instant_us("whole_from", inbox.whole_from))
        return {"group": name, "topic": topic}

    @routes.delete("/groups/{name}/subscriptions/{topic}")
    async def unsubscribe(name: str, topic: str, write: Write, who: Who) -> dict[str, Any]:
        """End a subscription and forget the group's position in the topic."""
        is_pattern = "*" in topic
        if not is_pattern and desk.running.core.queues.subscription(name, topic) is None:
            raise NotFound(f"group {name[:100]!r} has no subscription to {topic[:100]!r}")

        async def do() -> Any:
            if is_pattern:
                await desk.running.core.queues.drop_pattern(name, topic)
            else:
                await desk.running.core.delivery.following.unsubscribe(name, topic)
            return {"group": name, "topic": topic}

        return await desk.carry_out(write, who, "subscription.delete", f"{name}/{topic}", do, {})


def _writes(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/reset")
    async def reset(name: str, write: Reset, who: Who) -> dict[str, Any]:
        """Move a group to another position in a topic; the preview counts repeated and skipped messages."""
        move = Move(write.topic, write.to, write.replay_effects, write.force)
        preview, do = await desk.running.queues.groups.reset(name, move)
        return await desk.carry_out(write, who, "group.reset", f"{name}/{write.topic}", do, preview)

    @routes.get("/groups/{name}/priorities")
    async def priorities(name: str) -> dict[str, Any]:
        """Show the classes that share a group's deliveries by weight, and the topics' shares within them."""
        return _priorities_shown(desk.running.core.queues.priorities(name) or ONE_CLASS)

    @routes.put("/groups/{name}/priorities")
    async def put_priorities(name: str, write: PrioritiesWrite, who: Who) -> dict[str, Any]:
        """Replace a group's classes, weights and shares; consumers need no restart."""
        check_name("group", name)
        wanted = _priorities(write)

        async def do() -> Any:
            await desk.running.core.delivery.following.set_priorities(name, wanted)
            return _priorities_shown(wanted)

        return await desk.carry_out(write, who, "priorities.put", name, do, _priorities_shown(wanted))

    @routes.post("/groups/{name}/{action}")
    async def pause(name: str, action: str, write: Write, who: Who) -> dict[str, Any]:
        """Pause a group, so that its consumers get no messages, or resume it."""
        if action not in ("pause", "resume"):
            raise NotFound(f"a group can be paused or resumed, not {action[:40]!r}")
        preview, do = await desk.running.queues.groups.pause(name, action == "pause")
        return await desk.carry_out(write, who, f"group.{action}", name, do, preview)


def _objectives(routes: APIRouter, desk: Desk) -> None:
    async def revise(who: str, reason: str, objectives: Mapping[str, Objective]) -> None:
        administration = desk.running.administration
        await administration.revise(who, reason, administration.configuration.with_groups(OBJECTIVES, objectives))

    @routes.put("/groups/{name}/objective")
    async def put(name: str, write: ObjectiveWrite, who: Who) -> dict[str, Any]:
        """Set how soon a share of a group's messages is to be acknowledged; an alarm says when it is not."""
        check_name("group", name)
        if name not in desk.running.core.delivery.groups:
            raise NotFound(f"group {name!r} has no subscription: subscribe it first", "not_subscribed")
        wanted = Objective(write.within, write.share)
        objectives = desk.running.administration.configuration.objectives
        if len({*objectives, name}) > MOST_OBJECTIVES:
            raise InvalidRequest(f"{MOST_OBJECTIVES} groups have an objective; remove one first", "out_of_bounds")
        result = {"objective": asdict(wanted)}

        async def do() -> Any:
            await revise(who, write.reason, objectives | {name: wanted})
            return result

        return await desk.carry_out(write, who, "objective.put", name, do, result)

    @routes.delete("/groups/{name}/objective")
    async def delete(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Remove a group's objective."""
        objectives = desk.running.administration.configuration.objectives
        if name not in objectives:
            raise NotFound(f"group {name[:100]!r} has no objective")

        async def do() -> Any:
            await revise(who, write.reason, {group: o for group, o in objectives.items() if group != name})
            return {"objective": None}

        return await desk.carry_out(write, who, "objective.delete", name, do, {"objective": None})


def _pushes(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/pushes")
    async def shown() -> dict[str, Any]:
        """List the consumer groups whose messages are posted to a webhook, and their failures at this server."""
        return {"pushes": desk.running.pushes.shown()}

    @routes.put("/groups/{name}/push")
    async def put(name: str, write: PushWrite, who: Who) -> dict[str, Any]:
        """Post a group's messages to a webhook from now on; a status of 2xx acknowledges them."""
        check_name("group", name)
        wanted = Push(write.url, write.batch, write.at_once)
        configuration = desk.running.administration.configuration
        desk.running.pushes.check(name, wanted, configuration.pushes)

        async def do() -> Any:
            document = configuration.with_groups(PUSHES, configuration.pushes | {name: wanted})
            await desk.running.administration.revise(who, write.reason, document)
            return {"push": desk.running.pushes.shown().get(name)}

        preview = {"url": wanted.url, "batch": wanted.batch, "at_once": wanted.at_once}
        return await desk.carry_out(write, who, "push.put", name, do, {"push": preview})

    @routes.delete("/groups/{name}/push")
    async def delete(name: str, write: Write, who: Who) -> dict[str, Any]:
        """Stop posting a group's messages; they wait for consumers."""
        configuration = desk.running.administration.configuration
        if name not in configuration.pushes:
            raise NotFound(f"the messages of group {name[:100]!r} are posted to no webhook")

        async def do() -> Any:
            remaining = {group: push for group, push in configuration.pushes.items() if group != name}
            await desk.running.administration.revise(who, write.reason, configuration.with_groups(PUSHES, remaining))
            return {}

        return await desk.carry_out(write, who, "push.delete", name, do, {})
