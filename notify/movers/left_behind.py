"""LeftBehindMover: sends what producers in mode `auto` have left behind in the database of a relay or bridge (ADR 59).

Such a row is not one of an outbox, because a server may have its half: it goes, as a half and its outcome, to the
servers that keep the group's halves, never straight to the mover's target. The code is that of the group's own
processes (`LeftSender`), and may run at the same time as theirs: ids make all that is sent twice one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.check.listener import CheckUnavailable
from notify.client.producer.left_behind import LeftBehind, means_away
from notify.client.producer.left_sender import PROBE_SECONDS, LeftSender
from notify.client.producer.transactions import TransactionClient
from notify.client.tables import left_rows
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import WITHOUT_INDEX, half_message, notify_source, with_left_behind_index
from notify.client.threads.loop import instance_name
from notify.client.transport.http import read_answer
from notify.client.transport.servers import Servers, decode_members
from notify.errors import Backpressure, InvalidRequest, NotifyError, Unavailable
from notify.movers.outbox import SERVER
from notify.movers.sinks.sink import is_server
from notify.runtime.databases import has_table, is_lost, reason_of
from notify.runtime.guarantees import SELECT, UPDATE, Need

log = logging.getLogger("notify.movers")

LOOK_SECONDS = 10.0
"""How often a mover looks for what was left behind, like the group's own processes."""
MOST_STEPS = 100
"""The most steps in which a group's rows are sent before the next group's: each sends at most a thousand transactions.
"""
SLOWED_SECONDS = 1.0
"""The pause after a server took less than was sent, because of a rate or a full backlog."""
MOST_SLOWED = round(LOOK_SECONDS / SLOWED_SECONDS)
"""The most times that it is tried again after such a pause, before the next look."""
MOST_NAMED = 3
"""The most schemas that an error or warning names for one reason."""
SERVERS, SCHEMAS, LOOK = "servers", "schemas", "look"
"""The subjects of warnings: see `complain`."""
NEEDS = (Need(half_message, sees=(SELECT, UPDATE), times=True), Need(notify_source, sees=(SELECT,)))
"""The needs of a mover that sends what was left behind."""
NOT_TO_KAFKA = "Kafka knows no ids, and a server may have the half"
NOT_PAST_SERVERS = (
    "the schema has the table of servers, too, from which the target gets earlier messages with the same keys"
)
REMEDY = "Name the server of its producers with --transactions-url, or run a process of the group, or `notify check`"


class LeftBehindMover:
    """Sends for all producer groups of one mover's database. Belongs to one event loop, except for `waiting`."""

    def __init__(self, url: str, transactions_url: str = "") -> None:
        """`url`: the mover's target. `transactions_url`: the servers that keep the groups' halves; by default the
        target, unless that is Kafka or gets its messages from such servers: then what was left behind stays where it
        is, and a warning says so."""
        self._url = transactions_url or (url if is_server(url) else "")
        self._is_named = bool(transactions_url)
        self._instance = instance_name()
        self._complaints: dict[str, str] = {}
        """The last warning about each of SERVERS, SCHEMAS and LOOK."""
        self._without_index: list[str] = []
        """The schemas that are left alone since their table lacks the index, at the last look."""
        self._sending: asyncio.Task[None] | None = None
        self.sent = self.refused = 0
        """How many transactions the servers have stored, and how many they refuse permanently."""

    def waiting(self, connection: Connection, schemas: Sequence[str]) -> list[str]:
        """Those of these schemas in which something is left behind. Schemas without the index are left alone, because
        each look would read a whole table for a mode that they may not use. Any thread may call this, one at a time.
        """
        indexed = with_left_behind_index(connection, schemas)
        missing = [schema for schema in schemas if schema not in indexed]
        if missing and missing != self._without_index:
            log.warning("what may be left behind in schema %s is not sent: %s", ", ".join(missing[:3]), WITHOUT_INDEX)
        self._without_index = missing
        found = left_rows.with_waiting(connection, indexed) if indexed else []
        if not found:
            self._complaints = {}
        return found

    async def send(self, engine: Engine, schemas: Sequence[str]) -> None:
        """Send what is left behind in these schemas.

        Raises the first error, of a server or the database, after all groups were tried that it does not concern. If
        a server has to be named and is not, it only warns.
        """
        database = DatabaseCalls(engine)
        failed: Exception | None = None
        try:
            groups, unread = await self._groups(database, schemas)
            for group, its_schemas in groups.items():
                try:
                    await self._send_group(group, database, its_schemas)
                except CheckUnavailable as error:
                    failed = failed or Unavailable(f"what group {group} left behind is not sent: {error}")
                except (NotifyError, sa.exc.SQLAlchemyError, OSError) as error:
                    failed = failed or error
                    if is_lost(error) or (isinstance(error, NotifyError) and means_away(error)):
                        break
        finally:
            await database.close()
        if failed := failed or unread:
            raise failed

    async def try_to_send(self, engine: Engine, schemas: Sequence[str]) -> None:
        """As `send`, but an error is only logged, once for each reason: the next look tries again. While the
        servers only limit the rate, it continues until about the next look."""
        for _ in range(MOST_SLOWED):
            is_slowed = False
            try:
                await self.send(engine, schemas)
            except (NotifyError, sa.exc.SQLAlchemyError, OSError) as error:
                self.complain(SERVERS, f"messages that producers left behind wait in the database: {reason_of(error)}")
                is_slowed = isinstance(error, NotifyError) and error.status == Backpressure.status
                if is_slowed:
                    await asyncio.sleep(SLOWED_SECONDS)
            except Exception:
                log.exception("what producers left behind was not sent; the next look tries again")
            if not is_slowed:
                return

    def begin(self, engine: Engine, schemas: Sequence[str]) -> None:
        """`try_to_send` in the background, unless that is still under way from an earlier call."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self.try_to_send(engine, schemas))

    def complain(self, about: str, why: str) -> None:
        """Log why something is not sent, unless that is what was logged last about this: SERVERS, SCHEMAS or LOOK."""
        if why != self._complaints.get(about):
            self._complaints[about] = why
            log.warning("%s", why)

    async def close(self) -> None:
        """End what `begin` began."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _groups(
        self, database: DatabaseCalls, schemas: Sequence[str]
    ) -> tuple[dict[str, list[str]], Unavailable | None]:
        """The groups whose rows can be sent from here, with the schemas of each, and an error that names the schemas
        that cannot be read, if others can."""
        found: dict[str, list[str]] = {}
        unsent: dict[str, list[str]] = {}
        unread: dict[str, list[str]] = {}
        for schema in schemas:
            try:
                groups = await database.call(left_rows.groups, schema=schema)
                why = "" if self._url else NOT_TO_KAFKA
                if not self._is_named and not why and await database.call(has_table, SERVER.table.name, schema=schema):
                    why = NOT_PAST_SERVERS
            except (sa.exc.DBAPIError, CheckUnavailable) as error:
                if is_lost(error) or (len(schemas) == 1 and isinstance(error, sa.exc.DBAPIError)):
                    raise
                unread.setdefault(reason_of(error), []).append(schema)
                continue
            if why and groups:
                unsent.setdefault(why, []).append(schema)
                continue
            for group in groups:
                found.setdefault(group, []).append(schema)
        if unsent:
            self.complain(SCHEMAS, f"{_in_schemas(unsent)}. {REMEDY}")
        return found, Unavailable(_in_schemas(unread)) if unread else None

    async def _check_target(self, group: str, database: DatabaseCalls, schemas: Sequence[str]) -> None:
        """Raises InvalidRequest if the target has none of the shards that this group's rows name: a mover may copy to
        another cluster, which has none of the halves."""
        named: set[str] = set()
        for schema in schemas:
            named |= await database.call(left_rows.named_shards, group, schema=schema)
        if not named:
            return
        servers = Servers(self._url, "transactions")
        try:
            answer = read_answer(decode_members, await servers.call("GET", "/v1/members", b"", PROBE_SECONDS))
        except Unavailable:
            raise
        except NotifyError:
            return  # it answers: let it refuse the halves themselves
        finally:
            await servers.aclose()
        there = {shard for member in answer.servers() for shard in member.shards}
        if there and named.isdisjoint(there):
            raise InvalidRequest(
                f"what group {group} left behind is not sent: its rows name the shard {min(named)}, and the target has "
                f"{min(there)}: it is not the server of this group. {REMEDY}"
            )

    async def _send_group(self, group: str, database: DatabaseCalls, schemas: Sequence[str]) -> None:
        if not self._is_named:
            await self._check_target(group, database, schemas)
        left_behind = LeftBehind()
        left_behind.away()  # the server is asked whether it is there, before rows are read
        sender = LeftSender(
            group,
            left_behind,
            database,
            lambda: schemas,
            _NoOutcomes(),
            lambda: TransactionClient(self._url, group, instance=self._instance),
        )
        try:
            for _ in range(MOST_STEPS):
                if await sender.step():
                    return
        finally:
            self.sent += sender.sent
            self.refused += sender.refused
            await sender.close()


def _in_schemas(by_reason: dict[str, list[str]]) -> str:
    """Why what producers left behind is not sent, with some of the schemas of each reason."""
    parts = []
    for why, schemas in by_reason.items():
        more = f" and {len(schemas) - MOST_NAMED} more" if len(schemas) > MOST_NAMED else ""
        parts.append(f"what producers left behind in schema {', '.join(schemas[:MOST_NAMED])}{more} is not sent: {why}")
    return "; ".join(parts)


class _NoOutcomes:
    """The outcomes of a process that commits nothing itself; see SendsAgain."""

    async def send_again(self) -> bool:
        return True
