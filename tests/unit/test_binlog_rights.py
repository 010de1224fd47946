"""A bridge asks about its rights, and the database does not answer."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.binlog import rights


class Lost:
    """A connection whose session ends with the first statement; SQLAlchemy refuses the second one."""

    def __init__(self) -> None:
        self._is_lost = False

    def exec_driver_sql(self, statement: str) -> Any:
        if self._is_lost:
            raise sa.exc.PendingRollbackError("Can't reconnect until invalid transaction is rolled back")
        self._is_lost = True
        error = Exception(2013, "Lost connection to MySQL server during query")
        raise sa.exc.OperationalError(statement, None, error, connection_invalidated=True)


def test_a_lost_connection_is_no_answer_about_rights() -> None:
    with pytest.raises(sa.exc.OperationalError):  # the bridge asks again, as after any loss
        rights._table_findings(Lost())  # type: ignore[arg-type]
