"""LocalTransactionCheck: the default listener, which answers from the service's own half_message table."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.question import ask, read_source, short_waits
from notify.errors import UnsafeTable
from notify.guarantees import verify_once

log = logging.getLogger("notify.check")


class LocalTransactionCheck(CheckMessageListener):
    """Answers checks from the database of `engine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def check(self, half: HalfMessage) -> Outcome:
        """COMMIT or ROLLBACK according to the local row. Raises CheckUnavailable if the database cannot tell now."""
        try:
            with self.engine.connect() as connection:
                return answer(connection, half)
        except CheckUnavailable:
            raise
        except Exception as error:
            raise out_of_reach(error) from error


def out_of_reach(error: Exception) -> CheckUnavailable:
    """The error for a check whose database could not be asked. Logs the traceback of an unexpected error."""
    if not isinstance(error, SQLAlchemyError | OSError):
        log.error("asking the database failed with an error that is not the database's", exc_info=error)
    return CheckUnavailable(f"the database cannot be reached: {type(error).__name__}")


def answer(connection: Connection, half: HalfMessage) -> Outcome:
    """The outcome of a half according to the local table on this connection.

    Raises CheckUnavailable if the half names another database, if the row may have been purged, or if the database
    does not answer in time.
    """
    with short_waits(connection):
        return _answer(connection, half)


def _answer(connection: Connection, half: HalfMessage) -> Outcome:
    from notify.client.table import CHECKS  # the SDK imports this module while it is itself imported

    try:
        verify_once(connection, CHECKS)
        source, _ = read_source(connection)
        connection.rollback()
    except UnsafeTable as error:
        raise CheckUnavailable(str(error)) from error
    except SQLAlchemyError as error:
        raise CheckUnavailable(f"the database did not answer: {type(error).__name__}") from error
    if source != half.source:
        raise CheckUnavailable(
            f"this database is source {source}, but the half came from source {half.source or '(none)'}"
        )
    row = ask(connection, half.id, half.producer_group)
    if row.state == "COMMITTED" and half.shard in row.shards:
        return Outcome.COMMIT
    # The row is a tombstone, or a retry stored the transaction's half on another shard, and this half is left over.
    return Outcome.ROLLBACK


def is_async(engine: Any) -> bool:
    """Whether `engine` is an AsyncEngine."""
    return hasattr(engine, "sync_engine")
