"""Paces the reads of a copy of a database by its lag: before each query the audit waits until the copy has caught up.

A long query delays the replay on a standby, or uses the disk that a replica needs. Other readers of the copy should not
see old rows because of an audit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from notify.errors import Unavailable
from notify.spark.inputs.replicas import Replica

MOST_WAIT_SECONDS = 600
"""How long a query waits for the copy to catch up."""
LOOK_SECONDS = 1.0


class Pace:
    """Waits while a copy lags more than it may."""

    def __init__(
        self,
        name: str,
        most_lag_us: int,
        replica: Callable[[], Replica | None],
        now_us: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`name`: the name of the database. `most_lag_us` 0: never wait. `replica`: returns how current the database
        is, or None if it is not a copy."""
        self._name = name
        self._most_lag_us = most_lag_us
        self._replica = replica
        self._now_us = now_us
        self._sleep = sleep
        self._is_copy = True

    def wait(self) -> None:
        """Return once the copy is current enough. Raises Unavailable if it is not, or nobody knows, after 10 min."""
        if not self._most_lag_us or not self._is_copy:
            return
        why = ""
        for _ in range(int(MOST_WAIT_SECONDS / LOOK_SECONDS)):
            replica = self._replica()
            if replica is None:
                self._is_copy = False
                return
            if self._now_us() - replica.until_us <= self._most_lag_us:
                return
            why = replica.why
            self._sleep(LOOK_SECONDS)
        why = why or f"it has been more than {self._most_lag_us / 1e6:g} s behind for {MOST_WAIT_SECONDS} s"
        raise Unavailable(
            f"database {self._name}: {why}. The audit stops reading it: find out why it lags, or allow a longer lag "
            "with --most-lag-seconds"
        )


def waiting_sql(most_lag_us: int) -> str:
    """A statement of PostgreSQL that waits for a standby in the same way, in the session that will read a part.

    It does nothing on a primary.
    """
    return (
        "DO $$ BEGIN IF pg_is_in_recovery() THEN "
        f"FOR i IN 1..{MOST_WAIT_SECONDS} LOOP "
        "EXIT WHEN pg_last_wal_receive_lsn() IS NOT DISTINCT FROM pg_last_wal_replay_lsn() OR "
        f"clock_timestamp() - pg_last_xact_replay_timestamp() <= interval '{most_lag_us} microseconds'; "
        f"PERFORM pg_sleep({LOOK_SECONDS:g}); END LOOP; END IF; END $$"
    )
