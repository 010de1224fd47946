"""The admin routes: what is there, what is stuck, and mending it. Every write has a reason and is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Header
from pydantic import BaseModel, ConfigDict, Field

from notify import ids
from notify.errors import InvalidRequest, NotFound, Unavailable
from notify.limits import MODES, check_between, check_name
from notify.server.core import Core
from notify.server.delivery.cursor import Cursor
from notify.server.http import json_pulled
from notify.wire import instant
from storage.store import Flush, NewMessage, NewTransaction, State, Subscription, Topic, Transaction, dead_letter_topic

if TYPE_CHECKING:
    from notify.server.app import App

Who = Annotated[str, Header(alias="x-notify-user", max_length=255)]


class Write(BaseModel):
    """Every write says why, and may only say what it would do."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=1000)
    dry_run: bool = False


class TopicWrite(Write):
    queues: int = Field(1, ge=1, le=1024)
    retention: float = Field(0, ge=0, le=3650 * 86_400, description="seconds; 0: the server's default")
    flush: Literal["sync", "async", "memory"] = Field("sync", description="when halves and messages are answered")


class SubscriptionWrite(Write):
    mode: str = Field("shared", pattern=f"^({'|'.join(MODES)})$")
    start: str | int | None = None
    tags: list[str] = Field(default_factory=list, max_length=64)
    max_attempts: int = Field(16, ge=1, le=1000)
    retry_min: float = Field(1.0, ge=0.01, le=86_400)
    retry_max: float = Field(300.0, ge=0.01, le=40 * 86_400)


class Reset(Write):
    topic: str
    to: str | int


class Redrive(Write):
    ids: list[str] | None = Field(None, max_length=4096)
    max: int = Field(100, ge=1, le=4096)


def router(app: App) -> APIRouter:
    routes = APIRouter(tags=["admin"])

    def core() -> Core:
        if app.core is None:
            raise Unavailable("the server is starting or stopping; try again")
        return app.core

    async def carry_out(
        write: Write, who: str, what: str, target: str, do: Callable[[], Awaitable[Any]] | None, preview: Any
    ) -> dict[str, Any]:
        """Do it unless it is a dry run, and record it."""
        if write.dry_run or do is None:
            return {"status": 200, "dry_run": True, "target": target, "result": preview}
        result = await do()
        assert app.actions is not None
        await asyncio.to_thread(app.actions.record, core().clock(), who, what, target, write.reason, result)
        return {"status": 200, "dry_run": False, "target": target, "result": result}

    _topic_routes(routes, core, carry_out)
    _group_views(routes, core)
    _subscription_routes(routes, core, carry_out)
    _group_writes(routes, core, carry_out)
    _transaction_routes(routes, core, carry_out)
    _message_routes(routes, core)
    _dead_letter_routes(routes, core, carry_out)

    @routes.get("/actions")
    async def actions(max: int = 100) -> dict[str, Any]:
        check_between("max", max, 1, 10_000)
        assert app.actions is not None
        rows = await asyncio.to_thread(app.actions.newest, max)
        for row in rows:
            row["at"] = instant(row.pop("at_us"))
        return {"actions": rows}

    return routes


CarryOut = Callable[..., Awaitable[dict[str, Any]]]
GetCore = Callable[[], Core]


def _topic_routes(routes: APIRouter, core: GetCore, carry_out: CarryOut) -> None:
    def shown(topic: Topic) -> dict[str, Any]:
        bounds = [core().store.bounds(topic.name, q) for q in range(topic.queues)]
        return {
            "name": topic.name,
            "queues": [{"queue": q, "start": a, "end": b} for q, (a, b) in enumerate(bounds)],
            "retention": topic.retention_us / 1e6,
            "flush": topic.flush.name.lower(),
        }

    @routes.get("/topics")
    async def topics() -> dict[str, Any]:
        return {"topics": [shown(t) for t in core().store.topics()]}

    @routes.get("/topics/{name}")
    async def topic(name: str) -> dict[str, Any]:
        found = core().store.topic(name)
        if found is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        return shown(found)

    @routes.put("/topics/{name}")
    async def put_topic(name: str, write: TopicWrite, who: Who = "") -> dict[str, Any]:
        check_name("topic", name)
        topic = Topic(name, write.queues, round(write.retention * 1e6), Flush[write.flush.upper()])
        known = core().store.topic(name)
        if known is not None and write.queues < known.queues:
            raise InvalidRequest(f"topic {name!r} has {known.queues} queues; the number can grow, not shrink")

        async def do() -> Any:
            await core().store.create_topic(topic)
            core().transactions.topics_changed()
            core().delivery.topic_grew(name)
            return shown(topic)

        return await carry_out(write, who, "topic.put", name, do, {"queues": write.queues})

    @routes.delete("/topics/{name}")
    async def delete_topic(name: str, write: Write, who: Who = "") -> dict[str, Any]:
        found = core().store.topic(name)
        if found is None:
            raise NotFound(f"there is no topic {name[:100]!r}")

        async def do() -> Any:
            groups = [s.group for s in core().store.subscriptions() if s.topic == name]
            await core().store.delete_topic(name)
            for group in groups:
                core().delivery.forget(group, name)
            core().transactions.topics_changed()
            return {"deleted": name}

        return await carry_out(write, who, "topic.delete", name, do, shown(found))


def _group_views(routes: APIRouter, core: GetCore) -> None:
    def cursor_row(cursor: Cursor) -> dict[str, Any]:
        return {
            "topic": cursor.topic,
            "queue": cursor.queue,
            "position": cursor.progress.floor,
            "settled_above": len(cursor.progress.settled),
            "next": cursor.next,
            "lag": cursor.lag(),
            "retries": len(cursor.retries),
        }

    @routes.get("/groups")
    async def groups() -> dict[str, Any]:
        found = core().delivery.groups.values()
        rows = [
            {
                "name": g.name,
                "lag": sum(c.lag() for c in g.cursors.values()),
                "leased": g.in_flight(),
                "paused": g.paused,
            }
            for g in found
        ]
        return {"groups": rows}

    @routes.get("/groups/{name}")
    async def group(name: str) -> dict[str, Any]:
        g = core().delivery.groups.get(name)
        if g is None:
            raise NotFound(f"there is no group {name[:100]!r}")
        subscriptions = [s for s in core().store.subscriptions() if s.group == name]
        return {
            "name": name,
            "paused": g.paused,
            "subscriptions": [
                {"topic": s.topic, "mode": s.mode, "tags": list(s.tags), "max_attempts": s.max_attempts}
                for s in subscriptions
            ],
            "queues": [cursor_row(c) for c in g.cursors.values()],
            "leases": [
                {
                    "instance": lease.instance,
                    "topic": lease.cursor.topic,
                    "queue": lease.cursor.queue,
                    "messages": len(lease.open),
                    "until": instant(lease.deadline_us),
                }
                for lease in list(g.leases.values())[:1000]
            ],
            "instances": [{"name": i, "asked_at": instant(at)} for i, at in g.instances.items()],
        }


def _subscription_routes(routes: APIRouter, core: GetCore, carry_out: CarryOut) -> None:
    @routes.put("/groups/{name}/subscriptions/{topic}")
    async def subscribe(name: str, topic: str, write: SubscriptionWrite, who: Who = "") -> dict[str, Any]:
        check_name("group", name)
        check_name("topic", topic)
        for tag in write.tags:
            check_name("tag", tag)
        s = Subscription(
            name,
            topic,
            write.mode,
            tuple(write.tags),
            write.max_attempts,
            round(write.retry_min * 1e6),
            round(write.retry_max * 1e6),
        )

        async def do() -> Any:
            # A start counts for a new subscription: sending the same again must not move it (that is a reset).
            known = any(k.group == name and k.topic == topic for k in core().store.subscriptions())
            await core().delivery.subscribe(s, None if known else write.start)
            core().transactions.topics_changed()
            return {"group": name, "topic": topic, "mode": s.mode}

        return await carry_out(write, who, "subscription.put", f"{name}/{topic}", do, {"mode": s.mode})

    @routes.delete("/groups/{name}/subscriptions/{topic}")
    async def unsubscribe(name: str, topic: str, write: Write, who: Who = "") -> dict[str, Any]:
        if not any(s.group == name and s.topic == topic for s in core().store.subscriptions()):
            raise NotFound(f"group {name[:100]!r} has no subscription to {topic[:100]!r}")

        async def do() -> Any:
            await core().delivery.unsubscribe(name, topic)
            return {"group": name, "topic": topic}

        return await carry_out(write, who, "subscription.delete", f"{name}/{topic}", do, {})


def _group_writes(routes: APIRouter, core: GetCore, carry_out: CarryOut) -> None:
    @routes.post("/groups/{name}/reset")
    async def reset(name: str, write: Reset, who: Who = "") -> dict[str, Any]:
        s = next((s for s in core().store.subscriptions() if s.group == name and s.topic == write.topic), None)
        topic = core().store.topic(write.topic)
        if s is None or topic is None:
            raise NotFound(f"group {name[:100]!r} has no subscription to {write.topic[:100]!r}")
        preview = [
            {
                "queue": q,
                "from": core().store.progress(name, write.topic, q).floor,
                "to": core().delivery.resolve(write.topic, q, write.to),
            }
            for q in range(topic.queues)
        ]

        async def do() -> Any:
            await core().delivery.subscribe(s, write.to)
            return preview

        return await carry_out(write, who, "group.reset", f"{name}/{write.topic}", do, preview)

    @routes.post("/groups/{name}/{action}")
    async def pause(name: str, action: str, write: Write, who: Who = "") -> dict[str, Any]:
        if action not in ("pause", "resume"):
            raise NotFound(f"a group can be paused or resumed, not {action[:40]!r}")
        if name not in core().delivery.groups:
            raise NotFound(f"there is no group {name[:100]!r}")

        async def do() -> Any:
            await core().delivery.pause(name, action == "pause")
            return {"paused": action == "pause"}

        return await carry_out(write, who, f"group.{action}", name, do, {"paused": action == "pause"})


def _transaction_row(t: Transaction, now_us: int) -> dict[str, Any]:
    return {
        "id": ids.to_text(t.id),
        "producer_group": t.producer_group,
        "state": t.state.name,
        "source": t.source,
        "instance": t.instance,
        "stored_at": instant(t.stored_us),
        "age": round((now_us - t.stored_us) / 1e6, 3),
        "decided_at": instant(t.decided_us) if t.decided_us else None,
        "checks_answered": t.attempts,
        "next_check_at": instant(t.next_check_us) if t.next_check_us else None,
        "messages": [json_pulled(m) | {"topic": m.topic} for m in t.messages if not m.corrupt],
    }


def _transaction_routes(routes: APIRouter, core: GetCore, carry_out: CarryOut) -> None:
    @routes.get("/transactions")
    async def transactions(
        state: str | None = None,
        producer_group: str | None = None,
        older_than: float | None = None,
        max: int = 100,
    ) -> dict[str, Any]:
        """Undecided transactions, the oldest first: in doubt (PREPARED) and PARKED."""
        check_between("max", max, 1, 10_000)
        if state is not None and state not in ("PREPARED", "PARKED"):
            raise InvalidRequest("state is PREPARED or PARKED: decided transactions are found by id", "invalid_state")
        now_us = core().clock()
        older_us = None
        if older_than is not None:
            check_between("older_than", older_than, 0, 3650 * 86_400)
            older_us = now_us - round(older_than * 1e6)
        wanted = State[state] if state is not None else None
        found = core().store.undecided(wanted, producer_group, older_us, max)
        return {"transactions": [_transaction_row(t, now_us) for t in found]}

    def one(transaction_id: str) -> Transaction:
        try:
            found = core().store.transaction(ids.from_text(transaction_id))
        except ValueError as error:
            raise InvalidRequest(str(error), "invalid_id") from None
        if found is None:
            raise NotFound(f"no transaction {transaction_id} is known here")
        return found

    @routes.get("/transactions/{transaction_id}")
    async def transaction(transaction_id: str) -> dict[str, Any]:
        return _transaction_row(one(transaction_id), core().clock())

    @routes.post("/transactions/{transaction_id}/{action}")
    async def act(transaction_id: str, action: str, write: Write, who: Who = "") -> dict[str, Any]:
        """commit, rollback (forced), check (ask now) or resume (back from PARKED)."""
        if action not in ("commit", "rollback", "check", "resume"):
            raise NotFound(f"there is no action {action[:40]!r}; there are commit, rollback, check and resume")
        found = one(transaction_id)
        undecided = found.state in (State.PREPARED, State.PARKED)
        wanted = {"commit": State.COMMITTED, "rollback": State.ROLLED_BACK}.get(action)
        if not undecided and found.state != wanted:
            raise InvalidRequest(f"{found.state.name} is recorded already and stays", "outcome_conflict", 409)

        async def do() -> Any:
            if wanted is not None:
                result = (await core().store.decide([(found.id, None, wanted)], core().clock(), forced=True))[0]
                return {"state": result.state.name, "changed": result.changed}
            await core().store.resume_checks(found.id, core().clock(), anew=action == "resume")
            return {"state": "PREPARED" if action == "resume" else found.state.name}

        return await carry_out(write, who, f"transaction.{action}", transaction_id, do, {"state": found.state.name})


def _message_routes(routes: APIRouter, core: GetCore) -> None:
    @routes.get("/messages")
    async def messages(id: str) -> dict[str, Any]:
        return {"messages": [await message(id)]}

    @routes.get("/messages/{message_id}")
    async def message(message_id: str) -> dict[str, Any]:
        """One message's life: half, outcome, its place in the queue, and each group's progress past it."""
        try:
            transaction_id, number = ids.parse_message_id(message_id)
        except ValueError as error:
            raise InvalidRequest(str(error), "invalid_id") from None
        store = core().store
        t = store.transaction(transaction_id)
        mine = [m for m in t.messages if m.message_no == number] if t is not None else []
        if t is None or not mine:
            raise NotFound(f"no message {message_id} is known here")
        events = [{"at": instant(t.stored_us), "event": "half stored" if t.producer_group else "stored"}]
        if t.decided_us:
            events.append({"at": instant(t.decided_us), "event": t.state.name})
        places = [m for m in store.messages(transaction_id) if m.message_no == number]
        for place in places:
            where = f"{place.topic}/{place.queue}@{place.offset}"
            events.append({"at": instant(place.committed_us), "event": f"in queue {where}"})
        groups = []
        for group in core().delivery.groups.values():
            for place in places:
                cursor = group.cursors.get((place.topic, place.queue))
                if cursor is not None:
                    groups.append(_group_view(group.name, cursor, place.offset))
        return {
            "id": ids.message_id(transaction_id, number),
            "transaction": _transaction_row(t, core().clock()) | {"messages": []},
            "message": json_pulled(mine[0]),
            "timeline": events,
            "groups": groups,
        }


def _group_view(name: str, cursor: Cursor, offset: int) -> dict[str, Any]:
    if cursor.progress.is_settled(offset):
        state = "settled"
    elif offset < cursor.next:
        state = "handed out"
    else:
        state = "waiting"
    return {"group": name, "topic": cursor.topic, "state": state, "attempts": cursor.attempts(offset)}


def _dead_letter_routes(routes: APIRouter, core: GetCore, carry_out: CarryOut) -> None:
    def read(group: str, limit: int, offset: int = 0) -> list[Any]:
        name = dead_letter_topic(group)
        if core().store.topic(name) is None:
            return []
        return core().store.read(name, 0, offset, limit, 8 << 20)

    @routes.get("/groups/{name}/dead-letters")
    async def dead_letters(name: str, offset: int = 0, max: int = 100) -> dict[str, Any]:
        check_between("max", max, 1, 10_000)
        check_between("offset", offset, 0, 1 << 62)
        return {"messages": [json_pulled(m) for m in read(name, max, offset) if not m.corrupt]}

    @routes.post("/groups/{name}/dead-letters/redrive")
    async def redrive(name: str, write: Redrive, who: Who = "") -> dict[str, Any]:
        """Send dead letters to their topic again, as new messages for this one group's retry."""
        found = [m for m in read(name, 10_000) if not m.corrupt]
        if write.ids is not None:
            wanted = set(write.ids)
            found = [m for m in found if ids.message_id(m.transaction_id, m.message_no) in wanted]
        found = found[: write.max]
        names = [ids.message_id(m.transaction_id, m.message_no) for m in found]

        async def do() -> Any:
            items = []
            for m, message_id in zip(found, names, strict=True):
                topic = json_pulled(m)["topic"]
                if core().store.topic(topic) is None:
                    items.append({"id": message_id, "status": 404, "detail": f"topic {topic} is gone"})
                    continue
                # The new id follows from the dead letter's place, so that a repeated redrive sends it once.
                again = redriven_id(m.transaction_id, m.offset)
                new = NewTransaction(again, "", [NewMessage(topic, m.payload)], committed=True)
                result = (await core().store.put([new], core().clock()))[0]
                status = 201 if result.put == 0 else 200
                items.append({"id": message_id, "status": status, "as": ids.message_id(again, 0)})
            return {"items": items}

        return await carry_out(write, who, "dead_letter.redrive", name, do, {"ids": names})


def redriven_id(transaction_id: bytes, offset: int) -> bytes:
    """The transaction id under which a dead letter is sent again: a UUID of version 7, fixed by its place."""
    digest = bytearray(blake2b(transaction_id + offset.to_bytes(8, "big"), digest_size=16).digest())
    digest[:6] = transaction_id[:6]
    digest[6] = 0x70 | digest[6] & 0x0F
    digest[8] = 0x80 | digest[8] & 0x3F
    return bytes(digest)
