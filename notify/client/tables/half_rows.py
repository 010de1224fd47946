"""HalfRows: inserts the rows of half_message that commit with the local transaction, for checks and for relays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.client.tables.definitions import PARTIAL, half_message, left_behind_with
from notify.client.tables.schemas import Place, name_in_text
from notify.errors import BindingRefused, InvalidRequest, TooLarge
from notify.protocol.message import body_digest
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import LEFT_BEHIND, RELAYED, UNSENT, database_now
from notify.runtime.schemas import within

Mode = Literal["half", "outbox", "auto"]
"""`half`: the server has the messages, and a row only says that the transaction committed; `outbox`: the rows contain
the messages; `auto`: as `half` if the server stores the half in time, otherwise the row contains the messages and is
left behind, for a producer of the group, a relay or a bridge to send."""
MODES: tuple[Mode, ...] = ("half", "outbox", "auto")

TOGETHER = 16
"""The most rows of one statement whose text has them all."""
MOST_BYTES = 384 << 10
"""The most bytes of bodies in one statement, unless a single row has more: MySQL and MariaDB refuse a statement above
their max_allowed_packet, of which few servers have less than 1 MiB, and a driver may write a byte as two."""
_ESCAPED = b"\0\n\r\x1a\"'\\"
"""The bytes that drivers of MySQL and MariaDB write as two."""
_STRICT = "STRICT_ALL_TABLES"
"""The mode in which MySQL and MariaDB refuse a row instead of cutting it off, given for one statement: the session is
the service's, which may change its own mode at any time. MariaDB tells a driver the mode of this statement, by which
the driver escapes the next one, so that the session's other modes are kept there (NO_BACKSLASH_ESCAPES)."""
_MARK_COLUMNS = (
    "transaction_id", "producer_group", "mode", "state", "shards", "relayed", "message_no", "topic", "key", "tag",
)  # fmt: skip
_BODY_COLUMNS = ("headers", "body", "delay", "deliver_at", "ttl")
MOST_STATEMENTS = 1000
"""The most statements that are remembered; one that names its schema is of use in this schema only."""


@dataclass(slots=True, frozen=True)
class _Insert:
    """A statement that inserts a number of rows, compiled for the driver."""

    text: str
    order: list[str] | None
    """The parameters' names in the driver's order; None if the driver takes names."""


class HalfRows:
    """Inserts the rows of one producer group's transactions."""

    def __init__(self, group: str, mode: Mode, *, keep_messages: bool = False, left_behind: bool = False) -> None:
        """`keep_messages`: rows contain the messages in mode `half` too. `left_behind`: the rows are for transactions
        in mode `auto` whose half is not stored."""
        self._group = group
        self._with_bodies = keep_messages or left_behind or mode == "outbox"
        self._follows_left = mode == "auto" and not left_behind
        """Whether rows are inserted only if none with their keys is left behind, where one statement can tell."""
        waits = LEFT_BEHIND if left_behind else RELAYED
        self._fixed: dict[str, Any] = {
            "mode": "outbox" if mode == "outbox" else "half",
            "state": "COMMITTED",
            "relayed": UNSENT if mode == "outbox" else waits,
        }
        self._inserts: dict[tuple[str, bool, int, int], _Insert] = {}
        """By the schema that the statement names, whether it has digests, the number of its rows, and that of the keys
        that it asks for."""
        self._conversions: dict[str, Callable[[Any], Any]] | None = None

    def insert(
        self,
        connection: Connection,
        transaction_id: str,
        shard: str | None,
        messages: list[PackedMessage],
        place: Place,
    ) -> bool:
        """Insert a transaction's rows. `shard`: the shard that has its half.

        False, and nothing is inserted, if the connection's statements do not go to `place`, or (in mode auto, on
        PostgreSQL and SQLite) if a transaction with one of the keys was left behind.
        """
        whose = {"transaction_id": transaction_id, "producer_group": self._group, "shards": shard or ""}
        rows: list[dict[str, Any]] = [
            {"message_no": number, "topic": message.topic, "key": message.key, "tag": message.tag, **whose}
            for number, message in enumerate(messages)
        ]
        if self._with_bodies:
            _refuse_backslashes(connection)
            conversions = self._conversions
            if conversions is None:
                self._conversions = conversions = _conversions_of(connection)
            for row, message in zip(rows, messages, strict=True):
                row |= _body_columns(message)
                for name, convert in conversions.items():
                    row[name] = convert(row[name])
        if place.has_digest:
            for row, message in zip(rows, messages, strict=True):
                row["digest"] = body_digest(message.body or b"")
        if _lacks_clock(connection):
            for row in rows:
                row["created_at"] = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"
        dialect = connection.dialect.name
        follows = self._follows_left and dialect in PARTIAL and any(row["key"] is not None for row in rows)
        together = rows[: 1 if is_mariadb(connection) else TOGETHER]
        if dialect == "mysql":
            together = next(_parts(together))
        if follows and dialect == "sqlite":
            is_inserted = self._insert_unless_left(connection, place, together, [row["key"] for row in rows])
        elif _needs_no_guard(dialect, place):
            self._insert_many(connection, place, rows)
            return True
        else:
            _check_fits(connection, together)
            insert = self._guarded(connection, place, len(together), len(rows) if follows else 0)
            parameters = _expected(dialect, place) | (
                together[0] if len(together) == 1 else _numbered(rows if follows else together)
            )
            is_inserted = self._execute(connection, insert, parameters) == len(together)
        if not is_inserted:
            return False
        if len(rows) > len(together):
            self._insert_many(connection, place, rows[len(together) :])
        return True

    def _insert_many(self, connection: Connection, place: Place, rows: list[dict[str, Any]]) -> None:
        written = self._insert_values(connection, place, rows)
        if 0 <= written < len(rows):  # drivers that do not know it say -1
            raise BindingRefused(
                f"nothing is committed: {written} of {len(rows)} rows of {half_message.name} were written, because a "
                "trigger of that table skips the others: drop the trigger"
            )

    def _insert_values(self, connection: Connection, place: Place, rows: list[dict[str, Any]]) -> int:
        """Insert rows with VALUES; returns how many were written."""
        if len(rows) == 1 or _takes_many(connection):
            _check_fits(connection, rows)
            rows = [row | self._fixed for row in rows]
            insert = self._of_values(connection, place, 1, list(rows[0]))
            return self._execute(connection, insert, rows[0] if len(rows) == 1 else rows)
        written = 0
        for part in _parts(rows):
            if len(part) == 1:
                written += self._insert_values(connection, place, part)
                continue
            _check_fits(connection, part)
            insert = self._of_values(connection, place, len(part), list(part[0]))
            written += self._execute(connection, insert, _numbered(part))
        return written

    def _of_values(self, connection: Connection, place: Place, count: int, names: list[str]) -> _Insert:
        """The statement that inserts `count` rows with these columns and the fixed ones."""
        key = (f"VALUES {place.schema}", place.has_digest, count, 0)
        insert = self._inserts.get(key)
        if insert is None:
            table = within(half_message, place.schema)
            if count == 1:
                created = {} if "created_at" in names else {"created_at": database_now()}
                return self._keep(key, connection, table.insert().values(created), names)
            fixed: dict[str, Any] = {name: sa.literal_column(repr(value)) for name, value in self._fixed.items()}
            values = [
                {name: sa.bindparam(f"{name}_{number}", type_=half_message.c[name].type) for name in names}
                | fixed
                | {"created_at": database_now()}
                for number in range(count)
            ]
            insert = self._keep(key, connection, table.insert().values(values))
        return insert

    def _insert_unless_left(
        self, connection: Connection, place: Place, rows: list[dict[str, Any]], keys: list[str | None]
    ) -> bool:
        """Insert a transaction's first rows on SQLite, unless a row with one of its keys is left behind: then `relayed`
        of the first one is NULL, which the table refuses. The guard of other databases would cost twice as much,
        because a SELECT that reads the table that it inserts into gets a temporary one."""
        names = [f"key_{number}" for number in range(len(keys))]
        key = (f"UNLESS {place.schema}", place.has_digest, 1, len(keys))
        insert = self._inserts.get(key)
        if insert is None:
            table = within(half_message, place.schema)
            texts: dict[str, Any] = {name: sa.literal_column(repr(value)) for name, value in self._fixed.items()}
            is_left = _left_behind_with(table.alias("left_row"), "its_group", names)
            unless_left = sa.select(texts["relayed"]).where(~is_left).scalar_subquery()
            asks_not = sa.bindparam("asks") == sa.literal_column("0")
            texts["relayed"] = sa.case((asks_not, texts["relayed"]), else_=unless_left)
            insert = self._keep(key, connection, table.insert().values(texts), list(rows[0]))
        asked = dict(zip(names, keys, strict=True)) | {"its_group": self._group}
        asking = [row | asked | {"asks": int(number == 0)} for number, row in enumerate(rows)]
        try:
            return self._execute(connection, insert, asking if len(asking) > 1 else asking[0]) in (len(asking), -1)
        except sa.exc.IntegrityError as error:
            if f"{half_message.name}.relayed" not in str(error.orig):
                raise
            return False

    def _guarded(self, connection: Connection, place: Place, count: int, keys: int) -> _Insert:
        """The statement that inserts `count` rows, or none if they would not go to the place, or if a row with one of
        the transaction's `keys` is left behind (0: it does not matter)."""
        key = (place.schema if place.is_named else "", place.has_digest, count, keys)
        insert = self._inserts.get(key)
        if insert is None:
            columns = [*_MARK_COLUMNS, *(_BODY_COLUMNS if self._with_bodies else ())]
            columns += ["digest"] if place.has_digest else []
            insert = self._keep(key, connection, _guarded(connection, place, self._fixed, columns, count, keys))
        return insert

    def _keep(
        self, key: tuple[str, bool, int, int], connection: Connection, statement: Any, names: list[str] | None = None
    ) -> _Insert:
        """Compile a statement and remember it. `names`: the columns that get values, if the statement does not say."""
        if len(self._inserts) >= MOST_STATEMENTS:
            self._inserts = {}
        before = ""
        if is_mariadb(connection):
            before = f"SET STATEMENT sql_mode = CONCAT(@@sql_mode, ',{_STRICT}') FOR "
        elif connection.dialect.name == "mysql":
            statement = statement.prefix_with(f"/*+ SET_VAR(sql_mode = '{_STRICT}') */")
        compiled = statement.compile(dialect=connection.dialect, column_keys=names)
        self._inserts[key] = insert = _Insert(before + compiled.string, compiled.positiontup)
        return insert

    def _execute(self, connection: Connection, insert: _Insert, parameters: Any) -> int:
        """Execute a statement and return the number of its rows.

        Its text goes to the driver directly, which takes half the CPU time of SQLAlchemy's `execute`.
        """
        order = insert.order
        if order is not None:
            many = isinstance(parameters, list)
            listed = [tuple([row[name] for name in order]) for row in (parameters if many else [parameters])]
            parameters = listed if many else listed[0]
        return int(connection.exec_driver_sql(insert.text, parameters).rowcount)


def is_mariadb(connection: Connection) -> bool:
    """Whether this is a MariaDB. There a SELECT with UNION converts texts and cuts off bodies without an error in any
    sql_mode, so that no such statement inserts rows."""
    return bool(getattr(connection.dialect, "is_mariadb", False))


_NO_BACKSLASH_ESCAPES = 0x200
_WITH_BACKSLASHES = ("big5", "cp932", "gb18030", "gbk", "sjis")
"""Character sets of MySQL and MariaDB in which a backslash may be the second byte of a letter."""


def _refuse_backslashes(connection: Connection) -> None:
    """Raises BindingRefused if the driver would send a body as other bytes, or as SQL: asyncmy escapes bytes with
    backslashes, whether the session takes them so or not."""
    driver: Any = connection.connection.driver_connection
    if connection.dialect.driver == "asyncmy" and (
        driver.server_status & _NO_BACKSLASH_ESCAPES or driver._charset in _WITH_BACKSLASHES
    ):
        raise BindingRefused(
            "nothing is committed: asyncmy escapes a body with backslashes, which this session takes for a part of it "
            f"(sql_mode NO_BACKSLASH_ESCAPES, or the charset {driver._charset}): leave the mode out, give "
            "charset=utf8mb4, or use aiomysql"
        )


def _lacks_clock(connection: Connection) -> bool:
    """Whether the database's clock cannot order rows, so that a row gets the time of this machine, which is the
    database's: SQLite has milliseconds, and two processes may commit one after another within one."""
    return connection.dialect.name == "sqlite"


def _takes_many(connection: Connection) -> bool:
    """Whether the driver executes an INSERT with many rows as it should. Those of MySQL and MariaDB would send the rows
    one by one, because not every value is a parameter; psycopg2 with `executemany_mode="values_plus_batch"` would count
    those of the last statement alone."""
    dialect = connection.dialect
    is_in_batches = dialect.driver == "psycopg2" and not dialect.supports_sane_multi_rowcount
    return not is_in_batches and dialect.name not in ("mysql", "mariadb")


def _parts(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each statement, in order: at most TOGETHER, and MOST_BYTES of bodies if they are several."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        row_size = len(_body_of(row))
        if part and (len(part) == TOGETHER or size + row_size > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(row)
        size += row_size
    if part:
        yield part


def _body_of(row: dict[str, Any]) -> bytes:
    body = row.get("body")
    return getattr(body, "adapted", body) or b""  # psycopg2 wraps it


def _check_fits(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """Raises TooLarge if MySQL or MariaDB does not take a statement with these rows. It would end the connection, in
    most cases without a word of why, and the same again whenever the service repeats the transaction."""
    if connection.dialect.name not in ("mysql", "mariadb") or sum(len(_body_of(row)) for row in rows) <= MOST_BYTES:
        return
    size = sum(map(_written_bytes, rows))
    most = int(connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar() or 0)
    if size > most:
        raise TooLarge(
            f"nothing is committed: the database takes statements of {most:,} bytes, and a message of this transaction "
            f"needs {size:,}: SET GLOBAL max_allowed_packet to more, and in the configuration, or give the producer a "
            "store for large bodies"
        )


def _written_bytes(row: dict[str, Any]) -> int:
    """About the bytes of a row in a statement, and not less."""
    body = _body_of(row)
    texts = [value for value in row.values() if isinstance(value, str)]
    return len(body) + sum(body.count(byte) for byte in _ESCAPED) + sum(2 * len(t.encode()) for t in texts) + 1024


def _numbered(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters of a statement of several rows."""
    return {f"{name}_{number}": value for number, row in enumerate(rows) for name, value in row.items()}


def _needs_no_guard(dialect: str, place: Place) -> bool:
    """Whether a plain INSERT that names the schema does. On PostgreSQL the guard also notices that it was recreated."""
    return place.is_named and dialect != "postgresql"


def _expected(dialect: str, place: Place) -> dict[str, Any]:
    """The parameter of the guard."""
    if dialect == "postgresql":
        return {"its_table": place.table}
    return {"its_schema": place.schema.encode().hex().upper()}


def _guarded(
    connection: Connection, place: Place, fixed: dict[str, Any], columns: list[str], count: int, keys: int
) -> Any:
    """INSERT … SELECT of rows under a condition that holds in the place only. `fixed`: columns with the same value in
    all rows of this producer, which are part of the text: each parameter costs the driver a microsecond. `keys`: the
    number of the transaction's keys, with none of which a row of the group may be left behind."""
    is_postgresql = connection.dialect.name == "postgresql"
    table = within(half_message, place.schema) if place.is_named else half_message
    guard: Any
    if is_postgresql:
        guard = sa.text(f"pg_catalog.to_regclass({name_in_text(connection, place)}) = CAST(:its_table AS oid)")
    else:
        # Compared byte by byte: MySQL's own comparison takes T1 for t1.
        guard = sa.text("HEX(DATABASE()) = :its_schema")
    ends = [""] if count == 1 else [f"_{number}" for number in range(count)]
    if keys:
        names = ["key"] if keys == 1 else [f"key_{number}" for number in range(keys)]
        guard = sa.and_(guard, ~_left_behind_with(table.alias("left_row"), f"producer_group{ends[0]}", names))
    selects = []
    for number in range(count):
        texts: dict[str, Any] = {
            name: sa.literal_column(repr(value)) for name, value in (fixed | {"message_no": number}).items()
        }
        values: list[Any] = []
        for name in columns:
            end = ends[number]
            kind = half_message.c[name].type
            value: Any = texts.get(name, sa.bindparam(f"{name}{end}", type_=kind))
            # In a UNION PostgreSQL must know the type of each value, also of NULL. For most drivers SQLAlchemy writes
            # the types of texts, numbers and times.
            is_bare = connection.dialect.driver == "psycopg2" or isinstance(kind, sa.Float | sa.LargeBinary)
            values.append(sa.cast(value, kind) if is_postgresql and count > 1 and is_bare else value)
        selects.append(sa.select(*values, database_now()).where(guard))
    rows: Any = selects[0] if count == 1 else sa.union_all(*selects)
    return table.insert().from_select([*columns, "created_at"], rows, include_defaults=False)


def _left_behind_with(table: Any, group: str, keys: list[str]) -> Any:
    """The condition that a row of the group with one of the keys is left behind, by the names of their parameters."""
    kinds = half_message.c
    is_left = left_behind_with(
        table.c,
        sa.bindparam(group, type_=kinds.producer_group.type),
        [sa.bindparam(key, type_=kinds.key.type) for key in keys],
    )
    return sa.exists(sa.select(sa.literal_column("1")).select_from(table).where(is_left))


def _conversions_of(connection: Connection) -> dict[str, Callable[[Any], Any]]:
    """By column of a body, how the dialect converts its values for the driver; columns that need none are left out."""
    dialect = connection.dialect
    processors = {
        name: half_message.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in _BODY_COLUMNS
    }
    return {name: convert for name, convert in processors.items() if convert is not None}


def _body_columns(message: PackedMessage) -> dict[str, Any]:
    """The columns that only rows with bodies have."""
    return {
        "headers": encode_headers(message.headers),
        "body": message.body,
        "delay": message.delay,
        "deliver_at": naive_utc(message.deliver_at),
        "ttl": message.ttl,
    }


def row_of(message: PackedMessage) -> dict[str, Any]:
    """All columns of a row that has a message."""
    return {"topic": message.topic, "key": message.key, "tag": message.tag, **_body_columns(message)}


def encode_headers(headers: dict[str, str] | None) -> str | None:
    """Headers in the column's format: JSON, or None without headers."""
    return msgspec.json.encode(headers).decode() if headers else None


def naive_utc(moment: datetime | None) -> datetime | None:
    """An instant in the column's format: UTC without a time zone. Raises InvalidRequest if `moment` has no zone."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidRequest("deliver_at needs its time zone, for example datetime.now(UTC)")
    return moment.astimezone(UTC).replace(tzinfo=None)
