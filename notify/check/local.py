"""LocalTransactionCheck: the default listener, answered by the service's own half_message table."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from notify.check.listener import CheckMessageListener, CheckUnavailable, HalfMessage, Outcome
from notify.check.question import ask, read_source, short_waits

log = logging.getLogger("notify.check")


class LocalTransactionCheck(CheckMessageListener):
    """Asks the database of `engine` (an Engine, or the sync_engine of an AsyncEngine in `answer`)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def check(self, half: HalfMessage) -> Outcome:
        """COMMIT or ROLLBACK, as the local row says. Raises CheckUnavailable if that cannot be known now."""
        try:
            with self.engine.connect() as connection:
                return answer(connection, half)
        except CheckUnavailable:
            raise
        except Exception as error:
            raise out_of_reach(error) from error


def out_of_reach(error: Exception) -> CheckUnavailable:
    """The answer to a check whose database could not be asked; the log has the traceback of what no database raises."""
    if not isinstance(error, SQLAlchemyError | OSError):
        log.error("asking the database failed, and it is not the database's fault", exc_info=error)
    return CheckUnavailable(f"the database is out of reach: {type(error).__name__}")


def answer(connection: Connection, half: HalfMessage) -> Outcome:
    """The outcome of a half by the local table on this connection.

    Raises CheckUnavailable where the database is another one than the half names, where the row may have been
    purged, or where the database did not answer in time.
    """
    with short_waits(connection):
        return _answer(connection, half)


def _answer(connection: Connection, half: HalfMessage) -> Outcome:
    try:
        source, _ = read_source(connection)
        connection.rollback()
    except SQLAlchemyError as error:
        raise CheckUnavailable(f"the database did not answer: {type(error).__name__}") from error
    if source != half.source:
        raise CheckUnavailable(f"this database is source {source}, the half came from {half.source or 'none'}")
    stands = ask(connection, half.id, half.producer_group)
    if stands.state == "COMMITTED" and half.shard in stands.shards:
        return Outcome.COMMIT
    # A tombstone, or a half that this transaction does not count as its own: a retry stored it elsewhere.
    return Outcome.ROLLBACK


def is_async(engine: Any) -> bool:
    """Whether this is an AsyncEngine."""
    return hasattr(engine, "sync_engine")
