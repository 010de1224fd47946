"""LogRows: writes a transaction's messages into PostgreSQL's log only, for the bridge that reads it; no row is written.

Nothing but a replication slot keeps what is in the log, so that each statement looks whether a bridge's slot is there.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from notify.client.tables.definitions import WITHOUT_ROWS_MS, half_message, notify_source
from notify.client.tables.schemas import Place, name_in_text
from notify.errors import BindingRefused
from notify.protocol.logged import PREFIX, LoggedTransaction, encode
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import BODY, is_denied
from notify.runtime.schemas import within

MOST_PLACES = 10_000
"""The most schemas whose slots are remembered; then all are looked for again."""
_ALIVE = (
    "FROM pg_catalog.pg_replication_slots s WHERE s.plugin = 'pgoutput' AND s.database = current_database() "
    "AND s.wal_status IS DISTINCT FROM 'lost'"
)
# A bridge's publication has the name of its slot, and says of which schemas the bridge reads.
_SLOTS = sa.text(
    f"SELECT CAST(s.slot_name AS text) {_ALIVE} AND s.slot_name LIKE 'notify\\_%' AND EXISTS (SELECT 1 "
    "FROM pg_catalog.pg_publication_tables t WHERE t.pubname = s.slot_name AND t.schemaname = :home "
    f"AND t.tablename = '{half_message.name}') ORDER BY 1"
)
_WRITE = (
    f"SELECT is_here, has_slot, CASE WHEN is_here AND has_slot THEN CAST(pg_catalog.pg_logical_emit_message(true, "
    f"'{PREFIX}', CAST(:content AS bytea)) AS text) END FROM (SELECT "
    "pg_catalog.to_regclass({table}) = CAST(:its_table AS oid) AS is_here, "
    f"EXISTS (SELECT 1 {_ALIVE} AND CAST(s.slot_name AS text) = ANY (string_to_array(CAST(:slots AS text), ','))) "
    "AS has_slot) AS found"
)
_CONTENT = sa.bindparam("content", type_=BODY)


class LogRows:
    """Writes the transactions of one producer group into the log. Used as HalfRows is."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._slots: dict[Place, str] = {}
        """The bridges' slots that read a schema, separated by commas."""

    def insert(
        self,
        connection: Connection,
        transaction_id: str,
        shard: str | None,
        messages: list[PackedMessage],
        place: Place,
    ) -> bool:
        """Write a transaction's messages; nothing is written if this returns False: the connection's statements do not
        go to `place`. Raises BindingRefused if no bridge has a slot."""
        content = encode(LoggedTransaction(place.schema, transaction_id, self._group, messages))
        statement = sa.text(_WRITE.format(table=name_in_text(connection, place))).bindparams(_CONTENT)
        known = self._slots.get(place)
        for slots in (known, None):
            if slots is None:
                slots = self._found(connection, place)
            values: dict[str, Any] = {"content": content, "its_table": place.table, "slots": slots}
            is_here, has_slot, _ = connection.execute(statement, values).one()
            if not is_here:
                return False
            if has_slot:
                return True
        raise _refused(connection, place)

    def _found(self, connection: Connection, place: Place) -> str:
        """The slots of the bridges that read a schema. Raises BindingRefused if its audits cannot be told of it."""
        are_told = _tell_audits(connection, place)
        slots = ",".join([str(name) for name in connection.scalars(_SLOTS, {"home": place.schema})])
        if len(self._slots) >= MOST_PLACES:
            self._slots = {}
        if slots and are_told:
            self._slots[place] = slots
        return slots


def _tell_audits(connection: Connection, place: Place) -> bool:
    """Note that messages of this schema have no rows, with which an audit could compare them. Whether it was noted
    before: this transaction may still be rolled back."""
    source = within(notify_source, place.schema)
    column = source.c.rows_from
    if (connection.scalar(sa.select(sa.func.max(column))) or 0) >= WITHOUT_ROWS_MS:
        return True
    try:
        connection.execute(source.update().where(column < WITHOUT_ROWS_MS).values(rows_from=WITHOUT_ROWS_MS))
        return False
    except DBAPIError as error:
        if not is_denied(error.orig):
            raise
        raise BindingRefused(
            "nothing is committed: a producer with rows=False notes in notify_source that audits have nothing to "
            f"compare: GRANT SELECT, UPDATE ON {place.schema}.{notify_source.name} to its role"
        ) from error


def _refused(connection: Connection, place: Place) -> BindingRefused:
    level = connection.exec_driver_sql("SELECT current_setting('wal_level')").scalar()
    remedy = f"start `notify bridge --dsn …` for the schema {place.schema!r}, and try again"
    if level != "logical":
        remedy = f"ALTER SYSTEM SET wal_level = 'logical' (it is {level}), restart the server, and {remedy}"
    return BindingRefused(
        "nothing is committed: with rows=False the messages stand only in the database's log, and no bridge has a "
        f"replication slot that keeps it for them: {remedy}"
    )
