"""Admin routes of transactions: list those without an outcome, show one, and decide or check it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.declaration import Write
from notify.errors import InvalidRequest, NotFound
from notify.protocol import ids
from notify.protocol.limits import LIMITS, check_between, check_name
from notify.protocol.wire import decode_payload, instant
from notify.server.admin.representations import receivers, transaction_row
from notify.server.admin.writes import Asker, Desk, Who
from notify.server.core.core import Core
from notify.server.jobs.deciding import force
from notify.storage.records import State, StoredMessage, Transaction


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `transactions`."""
    _views(routes, desk)
    _actions(routes, desk)


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/transactions")
    async def transactions(
        state: str | None = None,
        producer_group: str | None = None,
        older_than: float | None = None,
        max: int = 100,
    ) -> dict[str, Any]:
        """List transactions without an outcome, PREPARED and PARKED, the oldest first; and count them by state.

        An answer has at most 8 MiB of message bodies, but at least those of one transaction. Transactions beyond that
        have `bodies_left_out`.

        `counts` also has COMMITTED and ROLLED_BACK, which this server counts from its start. If `counted_to` is not 0,
        PREPARED and PARKED are counted up to that number only.
        """
        check_between("max", max, 1, 10_000)
        if state is not None and state not in ("PREPARED", "PARKED"):
            raise InvalidRequest("state is PREPARED or PARKED: decided transactions are found by id", "invalid_state")
        if producer_group:
            check_name("producer_group", producer_group)
        now_us = desk.running.core.clock()
        older_us = None
        if older_than is not None:
            check_between("older_than", older_than, 0, 3650 * 86_400)
            older_us = now_us - round(older_than * 1e6)
        wanted = State[state] if state is not None else None
        waiting = await desk.running.core.store.undecided(wanted, producer_group, older_us, max, LIMITS.reply_bytes)
        shard, online = desk.running.core.transactions.shard, desk.running.core.checks.is_online
        rows = [transaction_row(t, now_us, shard) | {"producer_online": online(t.producer_group)} for t in waiting]
        return {"transactions": rows} | await _counts(desk.running.core)

    @routes.get("/transactions/{transaction_id}")
    async def transaction(transaction_id: str) -> dict[str, Any]:
        """Show a transaction, whether a producer polls for its checks, and the results of its latest checks."""
        stored = await _one(desk.running.core, transaction_id)
        core = desk.running.core
        log = [
            {"at": instant(e.at_us), "what": e.what, "instance": e.instance, "reason": e.reason}
            for e in core.checks.log.of(stored.id)
        ]
        row = transaction_row(stored, core.clock(), core.transactions.shard)
        return row | {"producer_online": core.checks.is_online(stored.producer_group), "checks": log}


async def _counts(core: Core) -> dict[str, Any]:
    in_doubt = await core.store.in_doubt()
    counts = {
        "PREPARED": in_doubt.prepared,
        "PARKED": in_doubt.parked,
        "COMMITTED": core.metrics.committed,
        "ROLLED_BACK": core.metrics.rolled_back,
    }
    return {"counts": counts, "counted_to": in_doubt.counted_to}


def _actions(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/transactions/{transaction_id}/{action}")
    async def act(transaction_id: str, action: str, write: Write, who: Who, asker: Asker) -> dict[str, Any]:
        """Act on a transaction: force a commit or rollback, check it now, or resume the checks of a PARKED one."""
        if action not in ("commit", "rollback", "check", "resume"):
            raise NotFound(f"there is no action {action[:40]!r}; there are commit, rollback, check and resume")
        stored = await _one(desk.running.core, transaction_id)
        asker.check("admin", stored.producer_group or "*", called="the producer group of this transaction")
        undecided = stored.state in (State.PREPARED, State.PARKED)
        wanted = {"commit": State.COMMITTED, "rollback": State.ROLLED_BACK}.get(action)
        if not undecided and stored.state != wanted:
            raise InvalidRequest(f"{stored.state.name} is already recorded, and final", "outcome_conflict", 409)

        async def do() -> Any:
            if wanted is not None:
                result = (await force(desk.running.core, [stored.id], wanted))[0]
                return {"state": result.state.name, "changed": result.changed}
            await desk.running.core.store.resume_checks(stored.id, desk.running.core.clock(), reset=action == "resume")
            return {"state": "PREPARED" if action == "resume" else stored.state.name}

        preview = _preview(desk.running.core, stored, wanted, action, names_groups=asker.may("view"))
        return await desk.carry_out(write, who, f"transaction.{action}", transaction_id, do, preview)


def _preview(
    core: Core, transaction: Transaction, wanted: State | None, action: str, *, names_groups: bool
) -> dict[str, Any]:
    """The state before and after an action, and which messages reach which groups.

    Without `names_groups` the consumer groups are left out: a caller without the right `view` must not learn of them.
    """
    if wanted is None:
        return {
            "state": transaction.state.name,
            "becomes": "PREPARED" if action == "resume" else transaction.state.name,
        }
    messages = [_message_row(core, m, wanted) for m in transaction.messages if not m.corrupt]
    if not names_groups:
        messages = [row | {"groups": None} for row in messages]
    return {"state": transaction.state.name, "becomes": wanted.name, "messages": messages}


def _message_row(core: Core, message: StoredMessage, wanted: State) -> dict[str, Any]:
    """A message's topic and key, and the groups that will receive it (None if another server has the queues)."""
    payload = decode_payload(message.payload)
    nobody: list[str] = []
    groups = (
        receivers(core, message.topic, payload.tag)
        if wanted == State.COMMITTED
        else nobody
        if core.has_queues
        else None
    )
    return {"topic": message.topic, "key": payload.key, "tag": payload.tag, "groups": groups}


async def _one(core: Core, transaction_id: str) -> Transaction:
    """A transaction by its id. Raises InvalidRequest, NotFound."""
    transaction = await core.store.transaction(ids.from_text(transaction_id))
    if transaction is None:
        raise NotFound(f"no transaction {transaction_id} is known here")
    return transaction
