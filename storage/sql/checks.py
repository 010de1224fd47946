"""The schedule of checks in a database. Any number of servers claim from it; none keeps it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.protocol import ids
from notify.protocol.wire import Payload
from notify.storage.checks import CheckAnswer, Checking, Due, new_token
from notify.storage.records import State
from notify.storage.sql.database import Database
from notify.storage.sql.lookups import IDS_A_STATEMENT, first_message, rows_by_id
from notify.storage.sql.rows import UNDECIDED, content_of
from notify.storage.sql.tables import server_half_message

LOOK_EVERY_US = 500_000
"""How often a server looks for due checks of a polling group."""
MOST_GROUPS = 1000
"""At this many noted producer groups, those whose next look is due are forgotten."""
_t = server_half_message.c


class SqlChecks:
    """Claims and answers checks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._look_us: dict[str, int] = {}
        """When to look again for due checks of a producer group."""

    async def claim(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        if limit <= 0 or now_us < self._look_us.get(producer_group, 0):
            return []

        def claim(connection: Connection) -> list[Due]:
            wanted = (
                sa.select(_t.transaction_id, _t.source, _t.instance, _t.attempts)
                .where(_t.producer_group == producer_group, _t.next_check_us <= now_us, _t.message_no == 0)
                .order_by(_t.next_check_us)
                .limit(limit)
                .with_for_update(skip_locked=True)
            )
            rows = connection.execute(wanted).all()
            if not rows:
                return []
            names = [str(row[0]) for row in rows]
            tokens = {name: new_token() for name in names}
            for first in range(0, len(names), IDS_A_STATEMENT):
                some = names[first : first + IDS_A_STATEMENT]
                asked = sa.case({name: tokens[name] for name in some}, value=_t.transaction_id, else_=_t.token)
                connection.execute(
                    server_half_message.update()
                    .where(_t.transaction_id.in_(some), _t.message_no == 0)
                    .values(token=asked, next_check_us=now_us + answer_within_us)
                )
            topics: dict[str, dict[str, None]] = {}
            for name, topic in connection.execute(
                sa.select(_t.transaction_id, _t.topic)
                .where(_t.transaction_id.in_(names))
                .order_by(_t.transaction_id, _t.message_no)
            ):
                topics.setdefault(str(name), {})[str(topic)] = None
            return [
                Due(
                    ids.from_text(str(name)),
                    tokens[str(name)],
                    str(source),
                    str(instance),
                    int(attempts),
                    tuple(topics.get(str(name), ())),
                    self._database.shard,
                )
                for name, source, instance, attempts in rows
            ]

        if len(self._look_us) >= MOST_GROUPS:  # names come from callers, and most are asked for once
            self._look_us = {group: at for group, at in self._look_us.items() if at > now_us}
        self._look_us[producer_group] = now_us + LOOK_EVERY_US  # even if the database does not answer
        claimed = await self._database.run(claim)
        if len(claimed) == limit:
            self._look_us.pop(producer_group, None)
        return claimed

    async def release(self, claimed: Sequence[Due], due_us: int) -> None:
        def release(connection: Connection) -> None:
            for due in claimed:
                connection.execute(
                    server_half_message.update()
                    .where(first_message(due.id), _t.token == due.token, _t.next_check_us.is_not(None))
                    .values(token=0, next_check_us=due_us)
                )

        await self._database.run(release)
        self._look_us.clear()

    async def answer(self, answer: CheckAnswer) -> bool:
        state = (State.PARKED if answer.park else State.PREPARED).name

        def record(connection: Connection) -> bool:
            fenced = server_half_message.update().where(
                first_message(answer.id), _t.token == answer.token, _t.state.in_(UNDECIDED)
            )
            values = {
                "token": 0,
                "next_check_us": answer.next_check_us,
                "attempts": answer.attempts,
            }
            if connection.execute(fenced.values(values)).rowcount != 1:
                return False
            _set_state(connection, answer.id, state)
            return True

        return answer.token > 0 and await self._database.run(record)

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        def read(connection: Connection) -> Checking | None:
            row = connection.execute(
                sa.select(_t.token, _t.attempts, _t.state, _t.producer_group).where(first_message(transaction_id))
            ).one_or_none()
            if row is None or row[2] not in UNDECIDED:
                return None
            return Checking(int(row[0]), int(row[1]), row[2] == State.PARKED.name, str(row[3]))

        return await self._database.run(read)

    async def resume(self, transaction_id: bytes, now_us: int, *, reset: bool) -> bool:
        def resume(connection: Connection) -> bool:
            values: dict[str, Any] = {"token": 0, "next_check_us": now_us}
            if reset:
                values["attempts"] = 0
            undecided = sa.and_(first_message(transaction_id), _t.state.in_(UNDECIDED))
            changed = connection.execute(server_half_message.update().where(undecided).values(values)).rowcount
            if changed and reset:
                _set_state(connection, transaction_id, State.PREPARED.name)
            return bool(changed)

        self._look_us.clear()
        return await self._database.run(resume)

    async def half_contents(self, claimed: Sequence[Due]) -> list[list[Payload]]:
        names = [ids.to_text(due.id) for due in claimed]
        by_id = await self._database.run(lambda connection: rows_by_id(connection, names))
        return [[content_of(row) for row in by_id.get(name, [])] for name in names]

    def next_us(self, producer_group: str) -> int | None:
        return self._look_us.get(producer_group, 0)


def _set_state(connection: Connection, transaction_id: bytes, state: str) -> None:
    """Set the state in all rows of a transaction."""
    connection.execute(
        server_half_message.update()
        .where(_t.transaction_id == ids.to_text(transaction_id), _t.state != state)
        .values(state=state)
    )
