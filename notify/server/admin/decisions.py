"""Admin routes that decide or check many transactions in one request: chosen ids, or all that match conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from notify.admin_api.transactions import Decision, TransactionConditions
from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.limits import check_name
from notify.protocol.wire import decode_payload, microseconds
from notify.server.access.principal import Principal
from notify.server.admin.representations import receivers
from notify.server.admin.writes import Asker, Desk, Who
from notify.server.core.core import Core
from notify.server.jobs import deciding
from notify.storage.records import State, Transaction

YOUNG_SECONDS = 600.0
"""Younger PREPARED transactions may still run at their producer, as audits assume (max_transaction_seconds)."""


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `transactions/commit`, `transactions/rollback` and `transactions/check`."""

    def add(action: str, text: str) -> None:
        async def act(write: Decision, who: Who, asker: Asker) -> dict[str, Any]:
            return await _decide(desk, action, write, who, asker)

        routes.add_api_route(
            f"/transactions/{action}", act, methods=["POST"], description=text, operation_id=f"{action}_transactions"
        )

    several = "the `ids` within the request, or with `all` the oldest 4,096 that match, as a job"
    add("commit", f"Force the commit of several transactions: {several}.")
    add("rollback", f"Force the rollback of several transactions: {several}.")
    add("check", f"Check several transactions now, and resume the PARKED ones: {several}.")


async def _decide(desk: Desk, action: str, write: Decision, who: str, asker: Principal) -> dict[str, Any]:
    """Raises InvalidRequest unless `write` has either ids or `all`; Forbidden."""
    if (write.ids is not None) == write.all:
        raise InvalidRequest("say which: give ids, or all with the conditions in wanted", "invalid_schema")
    core = desk.running.core
    if write.ids is not None:
        transaction_ids = list(dict.fromkeys(map(ids.from_text, write.ids)))
        stored = [await core.store.transaction(transaction_id) for transaction_id in transaction_ids]
        chosen, is_more = [t for t in stored if t is not None and t.state in deciding.UNDECIDED], False
    else:
        wanted = write.wanted
        if wanted.producer_group:
            check_name("producer_group", wanted.producer_group)
        state = None if wanted.state is None else State[wanted.state]
        newest_us = _newest_us(wanted, core.clock())
        matching = await core.store.undecided(state, wanted.producer_group, newest_us, deciding.MOST + 1, 0)
        chosen, is_more = matching[: deciding.MOST], len(matching) > deciding.MOST
        transaction_ids = [t.id for t in chosen]
        stored = list(chosen)
    groups = {t.producer_group for t in stored if t is not None}
    if write.wanted.producer_group is not None:
        groups.add(write.wanted.producer_group)
    for group in sorted(groups):
        asker.check("admin", group or "*", called="the producer group of one of these transactions")
    target = groups.pop() if len(groups) == 1 else "*"
    preview = _preview(core, action, chosen, names_groups=asker.may("view"))
    preview |= {"is_more": is_more, "left_out": len(transaction_ids) - len(chosen)}

    async def at_once() -> Any:
        return {"becomes": preview["becomes"], "items": await deciding.act(core, action, transaction_ids)}

    async def as_job() -> Any:
        spec = {"transactions": deciding.packed(transaction_ids), "from": 0, "until": len(transaction_ids)}
        return {"job": await desk.running.jobs.start(deciding.JOB + action, target, spec, len(transaction_ids))}

    do = as_job if write.all else at_once
    return await desk.carry_out(write, who, f"transactions.{action}", target, do, preview)


def _newest_us(wanted: TransactionConditions, now_us: int) -> int:
    """The latest time at which a matching transaction was stored, in microseconds since 1970."""
    bounds = [now_us]
    if wanted.older_than is not None:
        bounds.append(now_us - round(wanted.older_than * 1e6))
    if wanted.stored_before is not None:
        bounds.append(microseconds(wanted.stored_before))
    return max(0, min(bounds))


def _preview(core: Core, action: str, chosen: Sequence[Transaction], *, names_groups: bool) -> dict[str, Any]:
    """The outcome, number, producer groups and ages of the transactions, and which messages reach which groups.

    Without `names_groups` the consumer groups are left out: a caller without the right `view` must not learn of them.
    """
    now_us = core.clock()
    ages = [(now_us - t.stored_us) / 1e6 for t in chosen]
    wanted = deciding.WANTED[action]
    by_group = Counter(t.producer_group for t in chosen)
    preview: dict[str, Any] = {
        "becomes": "PREPARED" if wanted is None else wanted.name,
        "count": len(chosen),
        "parked": sum(t.state is State.PARKED for t in chosen),
        "producer_groups": dict(by_group.most_common()),
        "youngest_seconds": round(min(ages), 3) if ages else None,
        "oldest_seconds": round(max(ages), 3) if ages else None,
    }
    if wanted is None:
        return preview | {"offline": [name for name in sorted(by_group) if not core.checks.is_online(name)]}
    young = sum(t.state is State.PREPARED and age < YOUNG_SECONDS for t, age in zip(chosen, ages, strict=True))
    return preview | {"young": young, **_messages(core, chosen, wanted, names_groups=names_groups)}


def _messages(core: Core, chosen: Sequence[Transaction], wanted: State, *, names_groups: bool) -> dict[str, Any]:
    """The number of messages of the transactions, by topic; for a commit also the groups that receive them."""
    is_commit = wanted is State.COMMITTED
    by_topic: dict[str, int] = {}
    groups: dict[str, set[str] | None] = {}
    for message in (message for t in chosen for message in t.messages if not message.corrupt):
        by_topic[message.topic] = by_topic.get(message.topic, 0) + 1
        if is_commit:
            named = receivers(core, message.topic, decode_payload(message.payload).tag) if names_groups else None
            topic_groups = groups.setdefault(message.topic, None if named is None else set())
            if topic_groups is not None:
                topic_groups.update(named or ())
    topics: list[dict[str, Any]] = [{"topic": topic, "messages": count} for topic, count in sorted(by_topic.items())]
    if is_commit:
        for row in topics:
            named_groups = groups[row["topic"]]
            row["groups"] = None if named_groups is None else sorted(named_groups)
    return {"messages": sum(by_topic.values()), "topics": topics}
