"""LocalTransactionCheck: the default listener, which answers from the service's own half_message table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.question import MayNotAsk, ask, short_waits
from notify.check.sources import Sources
from notify.runtime.databases import reason_of, without_server_cursors
from notify.runtime.program_log import program_log

log = program_log("notify.check")


class LocalTransactionCheck(CheckMessageListener):
    """Answers checks from the database of `engine`: from the schema whose source a half names."""

    def __init__(self, engine: Engine, schema: str | None = None) -> None:
        """`schema`: the only schema to answer for; None: all schemas of the database that have Notify's tables."""
        self.engine = engine
        self._sources = Sources(schema)

    def check(self, half: HalfMessage) -> Outcome:
        """COMMIT or ROLLBACK according to the local row. Raises CheckUnavailable if the database cannot tell now."""
        return check(self.engine.connect, half, self._sources)


def check(connect: Callable[[], AbstractContextManager[Connection]], half: HalfMessage, sources: Sources) -> Outcome:
    """`answer` on a connection. Raises CheckUnavailable."""
    try:
        with connect() as connection:
            return answer(connection, half, sources)
    except CheckUnavailable:
        raise
    except Exception as error:
        raise out_of_reach(error) from error


def out_of_reach(error: Exception) -> CheckUnavailable:
    """The error for a check whose database could not be asked. Logs the traceback of an unexpected error."""
    if not isinstance(error, SQLAlchemyError | OSError):
        log.error("asking the database failed with an error that is not the database's", exc_info=error)
    return CheckUnavailable(f"the database cannot be reached: {type(error).__name__}: {reason_of(error)}")


def answer(connection: Connection, half: HalfMessage, sources: Sources | None = None) -> Outcome:
    """The outcome of a half according to the local tables on this connection.

    Raises CheckUnavailable if the half names another database, if the row may have been purged, or if the database
    does not answer in time.
    """
    with short_waits(connection), without_server_cursors(connection):
        return _answer(connection, half, Sources() if sources is None else sources)


def _answer(connection: Connection, half: HalfMessage, sources: Sources) -> Outcome:
    try:
        sources.freshen(connection)
        asked = sources.schemas_of(half.source)
        # A copied schema has the same source id: the row is in one of them, and a tombstone in each of the others. A
        # committed row proves the commit, also where no tombstone can be placed (a column of the service's own that is
        # NOT NULL, a trigger that refuses changes); without one, each of them has to answer.
        answered: list[str] = []
        denied: MayNotAsk | None = None
        doubt: CheckUnavailable | None = None
        for schema in asked:
            try:
                sources.verify(connection, schema)
                row = ask(connection, half.id, half.producer_group, schema, half.source)
            except MayNotAsk as error:
                denied = error
                continue
            except CheckUnavailable as error:
                doubt = error
                continue
            answered.append(schema)
            if row.commits(half.shard):
                return Outcome.COMMIT
        rows, unread = sources.elsewhere(connection, half.id, answered)
        if any(row.commits(half.shard) for row in rows):
            return Outcome.COMMIT
    except SQLAlchemyError as error:
        raise CheckUnavailable(f"the database did not answer: {reason_of(error)}") from error
    if doubt is not None:
        raise doubt
    if unread:
        raise CheckUnavailable(f"the schema {unread[0]!r}, which may have the row, is locked at the moment")
    if not answered and denied is not None:
        sources.warn_of_rights(denied)
        raise denied
    if not answered:
        raise CheckUnavailable(sources.unknown(half.source))
    # The row is a tombstone, or a retry stored the transaction's half on another shard, and this half is left over.
    return Outcome.ROLLBACK


def is_async(engine: Any) -> bool:
    """Whether `engine` is an AsyncEngine."""
    return hasattr(engine, "sync_engine")
